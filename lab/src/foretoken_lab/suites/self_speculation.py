"""Drafters that run a part of the target, next to those that do not, on prompts that no training saw.

The prompts are 36 first turns of at most 400 characters, of six kinds, from the evaluation sets of the corpora; the
first eight that fit of each set are passed over, because they were looked at while the methods were tuned. Answers end
where the target ends them: what a small model writes after that is mostly itself again, and a drafter that copies
would be praised for it. Which fixed exit and length to set next to them is found with the suite ``exits``, on other
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from foretoken.bench.suite import Column, Suite
from foretoken.data.folder import data_root
from foretoken.data.prompts import Prompt
from foretoken_lab.records import read_records

SETS = (("mt_bench", 6), ("gsm8k_test", 6), ("svamp", 6), ("spec_bench", 6), ("humaneval", 6), ("mbpp_test", 6))
LONGEST = 400  # characters
PASSED_OVER = 8


def held_out(data: Path | None) -> list[Prompt]:
    """The prompts.

    Raises:
        ConfigError: the folder of the corpora is not known.
        InputError: an evaluation set is not there.
    """
    folder = data_root(data) / "eval"
    return [prompt for name, count in SETS for prompt in _of_set(folder, name, count)]


def _of_set(folder: Path, name: str, count: int) -> Iterator[Prompt]:
    path = folder / f"{name}.jsonl.gz"
    fitting = (
        record
        for record in read_records(path, ("id", "category", "turns"))
        if len(record["turns"][0]) <= LONGEST and (name != "spec_bench" or record["category"] == "qa")
    )
    for record in islice(fitting, PASSED_OVER, PASSED_OVER + count):
        category = "qa" if name == "spec_bench" else name
        yield Prompt(id=str(record["id"]), text=record["turns"][0], category=category, place=str(path))


def _draft_ms(figures: Mapping[str, Any]) -> float | None:
    drafted = figures["num_draft_tokens"]
    return 1e3 * figures["time"]["draft"] / drafted if drafted else None


COUNTERS = {"layers": lambda llm: float(llm.target.layers_loaded)}
COLUMNS = (
    # head and adapter are not counted
    Column("layers\n/token", lambda figures: figures.get("counts", {}).get("layers"), "{:.1f}"),
    Column("ms/draft\ntoken", _draft_ms),
)

SUITE = Suite(
    name="self_speculation",
    question="what do drafters gain that run a part of the target?",
    model="zoo:base-ee",
    draft_model="zoo:draft",
    methods=(
        "draft_model",
        "ngram",
        "suffix",
        "kangaroo",
        "kangaroo+tree=true",
        "del",
        "del+reread_every=4",
        "del+exit_layer=3+draft_length=2",
    ),
    prompts=held_out,
    options={"max_tokens": 128, "dtype": "bfloat16"},
    counters=COUNTERS,
    columns=COLUMNS,
)
