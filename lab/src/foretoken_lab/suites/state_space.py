"""Chains and trees before a target with states that answers something, task by task, on questions that no training saw.

A tree of 2 n nodes, two a level, is as deep as a chain of n and has as many nodes as one of 2 n: next to the former it
shows what width accepts, next to the latter what depth does. The questions are the held-out ones of four tasks; answers
end where the target ends them. With ``--model grown:hybrid:100m`` the same texts cost what a large hybrid's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench.suite import Column, Suite
from foretoken.data.prompts import Prompt
from foretoken_lab.tasks import catalog
from foretoken_lab.tasks.catalog import Setting

TASKS = ("json", "code", "arithmetic", "profiles")
QUESTIONS = 10  # of each task
DEPTHS = (2, 3, 4)
DEEPEST = 8


def held_out(data: Path | None) -> list[Prompt]:
    """The first held-out questions of every task."""
    return [
        Prompt(id=example.id, text=example.prompt, category=name, place=f"the task '{name}'")
        for name in TASKS
        for example in catalog.find(name).examples(QUESTIONS, Setting(data=data))
    ]


def _step_ms(figures: Mapping[str, Any]) -> float | None:
    speed = figures.get("decode_tokens_per_second")
    return 1e3 * figures["tokens_per_step"] / speed if speed else None


_CHAINS = sorted({*DEPTHS, *(2 * depth for depth in DEPTHS), DEEPEST})

SUITE = Suite(
    name="state_space",
    question="what do chains and trees gain before a target with states?",
    model="zoo:hybrid",
    draft_model="zoo:draft",
    methods=(
        "ngram",
        "suffix",
        *(f"{copying}+num_speculative_tokens=4" for copying in ("ngram", "suffix")),
        "draft_model",
        *(f"draft_model+num_speculative_tokens={nodes}" for nodes in _CHAINS),
        "draft_model+tree=topk+num_drafts=2",
        *(f"draft_model+tree=topk+num_drafts=2+num_speculative_tokens={2 * depth}" for depth in DEPTHS),
        "draft_model+tree=reranked+num_drafts=2",
        *(f"draft_model+tree=reranked+num_drafts=2+num_speculative_tokens={2 * depth}" for depth in DEPTHS),
    ),
    prompts=held_out,
    options={"max_tokens": 128, "dtype": "bfloat16"},
    columns=(Column("ms/step", _step_ms),),
)
