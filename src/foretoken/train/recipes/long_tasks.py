"""``long-tasks``: ``base-tasks-2`` continued to 16,384 positions, as ``long`` continues ``base``.

Differs from ``long``: what is asked counts only here and there, as in ``base-tasks-2``, so that a block of pages with
keys teaches to find them and not the pages; and the profiles, which are questions about a text too, are read on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foretoken.train import sources as s
from foretoken.train.mixture import Source
from foretoken.train.objectives import SkippedPositions
from foretoken.train.recipes import base_tasks_2, long
from foretoken.train.trainer import Bounds


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


RECIPE = replace(
    long.RECIPE,
    name="long-tasks",
    description="base-tasks-2 continued to 16,384 positions (YaRN), with keys and sentences to find far back",
    sources=_mixture,
    bounds=Bounds(minutes=90),
    start="zoo:base-tasks-2",
    objective=lambda tokenizer, teacher: SkippedPositions(long.LONGEST, counted=base_tasks_2.answers_first(tokenizer)),
)
