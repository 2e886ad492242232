"""``base-tasks-3``: the fourth stage of ``base``, on kinds of questions that the third stage answered wrongly.

On new questions ``base-tasks-2`` computes wrongly far more often than it reasons wrongly, and confuses two things of
one passage. So there are rows of bare sums, and passages with up to five questions, where a passage that was read once
is learnt from five times. Half of the mixture stays language.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foretoken.train.mixture import Source
from foretoken.train.trainer import Bounds
from foretoken_lab.recipes import base_tasks_2
from foretoken_lab.recipes import sources as s


def mixture(root: Path) -> list[Source]:
    """Half tasks, half language."""
    return [
        s.task("arithmetic", 0.21),
        s.sums(0.06),
        s.task("profiles", 0.08),
        s.readings(0.10),
        s.task("keys", 0.02),
        s.task("json", 0.04),
        s.task("code", 0.03),
        s.corpus("gsm8k", 0.06, root),
        s.corpus("math", 0.02, root),
        s.corpus("stdlib_functions", 0.03, root),
        s.corpus("sgd_dialogues", 0.08, root),
        s.corpus("topical_chat", 0.05, root),
        s.corpus("openstax", 0.02, root),
        s.corpus("qmsum", 0.05, root),
        s.corpus("books", 0.15, root),
    ]


_SCHEDULE = base_tasks_2.RECIPE.schedule

RECIPE = replace(
    base_tasks_2.RECIPE,
    name="base-tasks-3",
    description="base, fourth stage: sums in rows, several questions a passage, 15.7 M parameters",
    sources=mixture,
    bounds=Bounds(minutes=60),
    start="zoo:base",
)
