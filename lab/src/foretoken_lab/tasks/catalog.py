"""The tasks: one explicit table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from foretoken.core.errors import ConfigError, nearest
from foretoken.data.folder import ENVIRONMENT, data_root
from foretoken_lab.tasks import arithmetic, forms, keys, passages, profiles, scoring, summaries
from foretoken_lab.tasks.example import Example

SEED = 20  # of every evaluation, so that figures of different days are about the same questions

_MOST_EXAMPLES = 100_000  # of a task; generated ones never end
_MOST_DRAWS = 20  # per requested example: a generator with few different prompts would never come to the limit

Scorer = Callable[[str, Example], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an evaluation fixes next to the task.

    Attributes:
        data: the data folder, if one was named.
        context: length of a prompt in what ``count`` counts; None takes the task's own.
        count: the length of a text, a tokenizer's as a rule.
    """

    data: Path | None = None
    context: int | None = None
    count: Callable[[str], int] = len

    @property
    def folder(self) -> Path | None:
        """The data folder: the one named, else that of the environment, else None.

        Raises:
            ConfigError: the path is not a folder.
        """
        return None if self.data is None and not os.environ.get(ENVIRONMENT) else data_root(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task.

    Attributes:
        name: as in the table.
        description: what the model has to do.
        source: gives its held-out examples, as many as there are; generated ones never end.
        score: output and example to shares; see :mod:`foretoken_lab.tasks.scoring`.
        max_tokens: what an answer may take.
        limit: default number of examples.
        context: default length of a prompt; None where prompts have their own length.
        data: "generated", "sample" (of the data folder, bundled) or "folder" (needs it).
    """

    name: str
    description: str
    source: Callable[[Setting], Iterable[Example]]
    score: Scorer
    max_tokens: int
    limit: int = 200
    context: int | None = None
    data: Literal["generated", "sample", "folder"] = "generated"

    def check(self, limit: int, setting: Setting) -> None:
        """Refuse, before a model is loaded, what this task cannot do.

        Raises:
            ConfigError: the data folder is needed and not named, the bundled sample has fewer examples than
                requested, or a context is given for prompts that have their own length.
        """
        if limit < 1:
            raise ConfigError(f"--limit {limit}: ask at least one example")
        if limit > _MOST_EXAMPLES:
            raise ConfigError(f"--limit {limit}: ask at most {_MOST_EXAMPLES} examples of a task")
        if setting.context is not None and self.context is None:
            fitting = ", ".join(task.name for task in TASKS.values() if task.context is not None)
            raise ConfigError(
                f"--prompt-tokens does not go with task '{self.name}': leave it out (it is for {fitting})"
            )
        if self.data == "folder":
            data_root(setting.data)
        elif self.data == "sample" and setting.folder is None and limit > passages.SAMPLE_SIZE:
            raise ConfigError(
                f"--limit {limit}: the bundled sample of task '{self.name}' has {passages.SAMPLE_SIZE} examples; name "
                f"the data folder with --data DIR, or set {ENVIRONMENT}"
            )

    def examples(self, limit: int, setting: Setting) -> list[Example]:
        """The first ``limit`` examples, or all that there are; no prompt twice.

        Raises:
            ConfigError: see :meth:`check`.
            InputError: a file of the data folder is missing or damaged.
        """
        self.check(limit, setting)
        distinct: dict[str, Example] = {}
        source = self.source(replace(setting, context=setting.context or self.context))
        for example in islice(source, min(_MOST_DRAWS * limit, sys.maxsize)):
            distinct.setdefault(example.prompt, example)
            if len(distinct) == limit:
                break
        return list(distinct.values())


def find(name: str) -> Task:
    """The task of this name.

    Raises:
        ConfigError: unknown; the nearest known name is offered.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task '{name}': {nearest(name, TASKS)}")
    return TASKS[name]


def _keys(setting: Setting) -> Iterable[Example]:
    assert setting.context is not None
    return keys.examples("heldout", SEED, length=setting.context, count=setting.count)


def _qmsum(setting: Setting) -> Iterable[Example]:
    assert setting.context is not None
    return summaries.qmsum(data_root(setting.data), setting.context, setting.count)


_TABLE = (
    Task(
        name="arithmetic",
        description="generated word problems of one to three steps",
        source=lambda setting: arithmetic.examples("heldout", SEED),
        score=scoring.score_number,
        max_tokens=128,
    ),
    Task(
        name="profiles",
        description="a question about a made-up passage; the answer is a span of it",
        source=lambda setting: profiles.examples("heldout", SEED),
        score=scoring.score_span,
        max_tokens=32,
    ),
    Task(
        name="keys",
        description="one of four numbers hidden in a long text",
        source=_keys,
        score=scoring.score_key,
        max_tokens=32,
        context=500,
    ),
    Task(
        name="json",
        description="a JSON object from a description in words",
        source=lambda setting: forms.json_examples("heldout", SEED),
        score=scoring.score_json,
        max_tokens=128,
    ),
    Task(
        name="code",
        description="a small Python function from a description in words",
        source=lambda setting: forms.code_examples("heldout", SEED),
        score=scoring.score_code,
        max_tokens=96,
    ),
    Task(
        name="squad",
        description="SQuAD: questions about Wikipedia paragraphs",
        source=lambda setting: passages.squad(setting.folder),
        score=scoring.score_span,
        max_tokens=48,
        data="sample",
    ),
    Task(
        name="factbook",
        description="questions about country pages of the World Factbook",
        source=lambda setting: passages.factbook(setting.folder),
        score=scoring.score_span,
        max_tokens=192,
        data="sample",
    ),
    Task(
        name="svamp",
        description="SVAMP: word problems of one or two steps",
        source=lambda setting: passages.svamp(data_root(setting.data)),
        score=scoring.score_number,
        max_tokens=160,
        data="folder",
    ),
    Task(
        name="gsm8k",
        description="GSM8K: word problems of two to eight steps",
        source=lambda setting: passages.gsm8k(data_root(setting.data)),
        score=scoring.score_number,
        max_tokens=320,
        data="folder",
    ),
    Task(
        name="qmsum",
        description="QMSum: questions about meetings, answered in sentences (ROUGE)",
        source=_qmsum,
        score=summaries.score_rouge,
        max_tokens=192,
        limit=50,
        context=1000,
        data="folder",
    ),
)

TASKS = {task.name: task for task in _TABLE}
