"""The generated tasks as question sets that ``foretoken train judge`` mines labels from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from foretoken_lab.tasks import catalog
from foretoken_lab.tasks.answers import holds
from foretoken_lab.tasks.behaviour import behaves
from foretoken_lab.tasks.catalog import Setting, Task
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.question_sets import Question, QuestionSet
from foretoken_lab.tasks.scoring import score_json
from foretoken_lab.tasks.training import TASKS


def question_set(name: str) -> QuestionSet:
    """A generated task as questions: of its training half, or of the half that evaluations ask."""
    task = catalog.find(name)

    def training(seed: int) -> Iterator[Question]:
        return (_question(task, example) for example in TASKS[name](seed))

    return QuestionSet(
        name=name,
        max_tokens=task.max_tokens,
        training=training,
        held_out=lambda count: [_question(task, example) for example in task.examples(count, Setting())],
    )


def _question(task: Task, example: Example) -> Question:
    return Question(
        prompt=example.prompt, right=partial(_right, task, example), still_right=partial(still_right, task, example)
    )


def _right(task: Task, example: Example, said: str) -> bool:
    return task.score(said, example)["correct"] == 1.0


def still_right(task: Task, example: Example, said: str) -> bool:
    """Whether a text is right, or as good.

    By the task's checker; also a function that does the same, and in words an answer that holds the right one. An
    object that has a key twice is not right: its reader takes the last.
    """
    scores = task.score(said, example)
    if scores["correct"] == 1.0:
        return task.score is not score_json or not _says_twice(said)
    if example.calls:
        return behaves(said, example)
    return "f1" in scores and any(holds(said, answer) for answer in (example.answer, *example.alternatives))


def _says_twice(text: str) -> bool:
    """Whether an object of a JSON text has a key twice: its reader takes the last, and the text is no better for it."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found |= len(dict(pairs)) < len(pairs)

    json.loads(text, object_pairs_hook=look)
    return found


ARITHMETIC, CODE, JSON, KEYS, PROFILES = map(question_set, ("arithmetic", "code", "json", "keys", "profiles"))
