"""A suite: recipes to compare on prompts, as data, and additional measurements.

Suites are entry points of the group ``foretoken.suites``; foretoken-lab has some. ``foretoken bench --suite NAME``
runs one: plain decoding first, every method on the same prompts in interleaved order, decoding apart from the
prompt.
"""

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
        header: its heading.
        read: returns the value of a row; None is printed as a dash.
        form: format of a number; text is printed unchanged.
    """

    header: str
    read: Callable[[Mapping[str, Any]], Any]
    form: str = "{:.2f}"

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the printed value."""
        value = self.read(row)
        return "–" if value is None else value if isinstance(value, str) else self.form.format(value)


@dataclass(frozen=True)
class Section:
    """An additional table of a suite.

    Attributes:
        name: its key in the JSON.
        title: its title.
        columns: the first column names the row.
        rows: JSON-ready.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """The input of a study: the suite's finished run.

    Attributes:
        engines: label -> ``LLM``, the baseline first.
        methods: the rows, the baseline first.
        prompts: the run's prompts.
        params: the run's sampling parameters.
        chat: whether prompts go through the chat template.
        data: the folder of the corpora; None if unset.
        limit: requested prompts per category, which a study may use as its number of questions. None: its default.
        progress: called with the study's current work, which may take minutes.
    """

    engines: Mapping[str, Any]
    methods: Sequence[Method]
    prompts: Sequence[Prompt]
    params: SamplingParams
    chat: bool
    data: Path | None = None
    limit: int | None = None
    progress: Callable[[str], None] = lambda what: None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Recipes to compare on prompts.

    Attributes:
        name: the name for users.
        question: the comparison, in one line.
        methods: the recipes, in the form of ``--methods``.
        model: the target.
        draft_model: for recipes that need one; None: the target's own.
        prompts: returns the prompts; its argument is the folder of the corpora, None if unset.
        options: defaults that differ from those of ``foretoken bench``: ``max_tokens``, ``repeats``, ``temperature``,
            ``ignore_eos``, ``dtype``.
        counters: name -> a function of the baseline's engine; the figure is the counter per token.
        columns: additional columns of the table of decoding.
        study: additional measurements.
    """

    name: str
    question: str
    methods: Sequence[str]
    model: str = "zoo:base"
    draft_model: str | None = None
    prompts: Callable[[Path | None], list[Prompt]] = lambda data: read_prompts(BUNDLED_SUITE)
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    counters: Mapping[str, Callable[[Any], float]] = field(default_factory=lambda: MappingProxyType({}))
    columns: Sequence[Column] = ()
    study: Callable[[Run], list[Section]] | None = None


def find_suite(name: str) -> Suite:
    """Return a suite by its name.

    Raises:
        ConfigError: unknown suite; the message names the nearest.
    """
    found = extensions.loaded(extensions.SUITES, name)
    if found is None:
        known = suites()
        remedy = (
            nearest(name, known).rstrip(".")
            if known
            else f"named suites are part of foretoken-lab; {extensions.GET_LAB}"
        )
        raise ConfigError(f"unknown suite '{name}': {remedy}; or name a file of prompts, for example ./{name}.jsonl")
    return found


def suites() -> list[str]:
    """Return the names of all suites."""
    return list(extensions.declared(extensions.SUITES))


def is_file(suite: str) -> bool:
    """Return whether ``--suite`` names a file of prompts: names of suites are bare words."""
    return bool(set(suite) & set("./\\~")) or Path(suite).exists()


def read_suite(suite: str | None, data: Path | None = None) -> list[Prompt]:
    """Return the prompts of a named suite or of a file; by default, of the bundled file.

    Args:
        data: the folder of the corpora, for named suites.
    Raises:
        ConfigError, InputError: unknown suite, or unreadable prompts.
    """
    if suite is not None and not is_file(suite):
        return find_suite(suite).prompts(data)
    return read_prompts(suite or BUNDLED_SUITE)


def fingerprint(suite: str | None, prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of the file, or of the prompts of a named suite."""
    if suite is None or is_file(suite):
        return hashlib.sha256(Path(suite or BUNDLED_SUITE).read_bytes()).hexdigest()
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()
