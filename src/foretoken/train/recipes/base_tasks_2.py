"""``base-tasks-2``: the third stage of ``base``, on the tasks that were weakest after the second, and more language.

After ``base-tasks`` json and code are answered, arithmetic and profiles are not, and novels had become 0.17 nats
harder: the first two give up a third of their share to books, code and dialogue. A narrower third stage (nine tenths
tasks) gained more in arithmetic, and lost 0.2 to 0.3 nats.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foretoken.train import sources as s
from foretoken.train.mixture import Source
from foretoken.train.recipes import base_tasks
from foretoken.train.trainer import Bounds


def mixture(root: Path) -> list[Source]:
    """Three fifths tasks, two fifths language."""
    return [
        s.task("arithmetic", 0.29),
        s.task("profiles", 0.17),
        s.task("keys", 0.04),
        s.task("json", 0.05),
        s.task("code", 0.05),
        s.corpus("gsm8k", 0.07, root),
        s.corpus("math", 0.03, root),
        s.corpus("stdlib_functions", 0.04, root),
        s.corpus("stdlib", 0.02, root),
        s.corpus("sgd_dialogues", 0.08, root),
        s.corpus("topical_chat", 0.05, root),
        s.corpus("books", 0.11, root),
    ]


_SCHEDULE = base_tasks.RECIPE.schedule

RECIPE = replace(
    base_tasks.RECIPE,
    name="base-tasks-2",
    description="base, third stage: continued on its weaknesses, 15.7 M parameters",
    sources=mixture,
    schedule=replace(_SCHEDULE, rates=_SCHEDULE.rates.scaled(0.8)),
    bounds=Bounds(minutes=107),
)
