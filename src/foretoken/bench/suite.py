"""A suite: recipes that are compared on prompts, as data, and what is looked at next to the common table.

Suites are entry points of the group ``foretoken.suites``; foretoken-lab has some. ``foretoken bench --suite NAME``
runs one: plain decoding first, every method on the same prompts in interleaved order, decoding apart from the
prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretoken.bench.harness import Method
from foretoken.core import extensions
from foretoken.core.errors import ConfigError, nearest
from foretoken.data.prompts import BUNDLED_SUITE, Prompt, read_prompts
from foretoken.options.sampling import SamplingParams


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: above it.
        read: takes the value out of a row; None is printed as a dash.
        form: how a number is printed; text is printed as it is.
    """

    header: str
    read: Callable[[Mapping[str, Any]], Any]
    form: str = "{:.2f}"

    def cell(self, row: Mapping[str, Any]) -> str:
        """The value as it is printed."""
        value = self.read(row)
        return "–" if value is None else value if isinstance(value, str) else self.form.format(value)


@dataclass(frozen=True)
class Section:
    """A table of a suite's own.

    Attributes:
        name: its key in the JSON.
        title: above the table.
        columns: the first one names the row.
        rows: JSON-ready.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """What a study may use: the run that the suite has just made, ready for more.

    Attributes:
        engines: label -> ``LLM``, the baseline first.
        methods: the rows, the baseline first.
        prompts: of the run.
        params: of the run.
        chat: whether prompts go through the chat template.
        data: the folder of the corpora; None where nobody named it.
        limit: how many prompts of every category were asked for; a study may take so many questions. None: its own.
        progress: is told what a study is doing; it may take minutes.
    """

    engines: Mapping[str, Any]
    methods: Sequence[Method]
    prompts: Sequence[Prompt]
    params: SamplingParams
    chat: bool
    data: Path | None = None
    limit: int | None = None
    progress: Callable[[str], None] = lambda what: None


def bundled_prompts(data: Path | None) -> list[Prompt]:
    """The suite of 30 prompts that the package brings."""
    return read_prompts(BUNDLED_SUITE)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Recipes on prompts.

    Attributes:
        name: what users type.
        question: what it compares, in one line.
        methods: the recipes, written as for ``--methods``.
        model: the target.
        draft_model: for recipes that need one; None: the target's own.
        prompts: reads them; its argument is the folder of the corpora, None where nobody named it.
        options: defaults of the command line that differ from those of ``foretoken bench``: ``max_tokens``,
            ``repeats``, ``temperature``, ``ignore_eos``, ``dtype``.
        counters: name -> what to read of the baseline's engine; the figure is what a token cost of it.
        columns: of the table of decoding, next to the common ones.
        study: measures what the harness does not.
    """

    name: str
    question: str
    methods: Sequence[str]
    model: str = "zoo:base"
    draft_model: str | None = None
    prompts: Callable[[Path | None], list[Prompt]] = bundled_prompts
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    counters: Mapping[str, Callable[[Any], float]] = field(default_factory=lambda: MappingProxyType({}))
    columns: Sequence[Column] = ()
    study: Callable[[Run], list[Section]] | None = None


def find_suite(name: str) -> Suite:
    """A suite by its name.

    Raises:
        ConfigError: there is no such suite; the message names the nearest.
    """
    found = extensions.loaded(extensions.SUITES, name)
    if found is None:
        known = suites()
        remedy = (
            nearest(name, known).rstrip(".") if known else f"named suites come with foretoken-lab; {extensions.GET_LAB}"
        )
        raise ConfigError(f"unknown suite '{name}': {remedy}; or name a file of prompts, for example ./{name}.jsonl")
    suite: Suite = found
    return suite


def suites() -> list[str]:
    """The names of all suites."""
    return list(extensions.declared(extensions.SUITES))


def is_file(suite: str) -> bool:
    """Whether ``--suite`` names a file of prompts: names of suites are bare words."""
    return bool(set(suite) & set("./\\~")) or Path(suite).exists()


def read_suite(suite: str | None, data: Path | None = None) -> list[Prompt]:
    """The prompts of a named suite or of a file; of the bundled file where neither is named.

    Args:
        data: the folder of the corpora, where named suites may look.
    Raises:
        ConfigError, InputError: there is no such suite, or its prompts cannot be read.
    """
    if suite is not None and not is_file(suite):
        return find_suite(suite).prompts(data)
    return read_prompts(suite or BUNDLED_SUITE)


def fingerprint(suite: str | None, prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the file, or of the prompts that a named suite has put together."""
    if suite is None or is_file(suite):
        return hashlib.sha256(Path(suite or BUNDLED_SUITE).read_bytes()).hexdigest()
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()
