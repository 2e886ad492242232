"""``long``: ``base`` continued to 16,384 positions, on text in which far context matters.

Rotary positions are scaled by YaRN (Peng et al., 2024) from the 512 that ``base`` saw, and the blocks skip positions
(PoSE), so distances up to the longest are learnt on blocks of 1,024 tokens. Half of the mixture hides keys in
pages of books and asks for them, some of it asks for sentences of the pages again; the rest keeps what ``base`` can do.
Tokens of questions count only here and there, as in ``base-tasks-2``, so that a block of pages with keys teaches to
find the keys and not the pages.

The published weights began as ``base-tasks-2``, the stage of ``base`` before the last.
"""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerBase

from foretoken.train.mixture import Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, copy_all
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import base, base_tasks_2
from foretoken_lab.recipes import sources as s
from foretoken_lab.recipes.objectives import SkippedPositions

LONGEST = 16_384


def _config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    config = base.RECIPE.config(tokenizer)
    config.max_position_embeddings = LONGEST
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": LONGEST / 512,
        "original_max_position_embeddings": 512,
    }
    return config


def _mixture(root: Path) -> list[Source]:
    return [
        s.hidden_keys(0.48, root),
        s.recall(0.06, root),
        s.task("profiles", 0.12),
        s.task("arithmetic", 0.04),
        s.task("json", 0.02),
        s.task("code", 0.02),
        s.corpus("qmsum", 0.08, root),
        s.corpus("sgd_dialogues", 0.05, root),
        s.corpus("topical_chat", 0.03, root),
        s.corpus("books", 0.10, root),
    ]


RECIPE = Recipe(
    name="long",
    description="base continued to 16,384 positions (YaRN), with keys and sentences to find far back",
    config=_config,
    sources=_mixture,
    block=1024,
    schedule=Schedule(batch=8, micro_batch=4, rates=Rates(muon=2e-3, adamw=1e-3)),
    bounds=Bounds(minutes=90),
    start="zoo:base",
    adopt=copy_all,
    objective=lambda tokenizer, teacher: SkippedPositions(LONGEST, counted=base_tasks_2.answers_first(tokenizer)),
)
