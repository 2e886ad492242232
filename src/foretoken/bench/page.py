"""A benchmark's report in two forms, for a terminal and as Markdown, with the same tables (sheets.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from foretoken.bench.sheets import in_words, sheets
from foretoken.bench.suite import Column, Section
from foretoken.bench.table import escaped, markdown_table, terminal_table

_FAILED = "{method}: prompt {prompt} failed: {error}"


def terminal_page(
    results: Sequence[dict[str, Any]], title: str, columns: Sequence[Column] = (), sections: Sequence[Section] = ()
) -> RenderableType:
    """Format for a terminal; see :func:`foretoken.bench.sheets.sheets`."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    for sheet in sheets(results, columns, sections):
        parts += [Text(), terminal_table(sheet)]
        if sheet.meaning:
            parts.append(Text(sheet.meaning, style="dim"))
    parts += [Text(_FAILED.format(**each), style="red") for each in errors_of(results)]
    return Group(*parts)


def markdown_page(
    results: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
    columns: Sequence[Column] = (),
    sections: Sequence[Section] = (),
) -> str:
    """Format as Markdown, with the command that reproduces it.

    Args:
        results: result of :func:`foretoken.bench.summary.summarise`.
        provenance: result of :func:`foretoken.core.provenance.provenance`.
        columns, sections: additions of a suite; see :func:`foretoken.bench.sheets.sheets`.
    """
    commit = provenance.get("commit") or "of an installed package"
    parts = [
        f"# foretoken bench: {escaped(str(provenance['model']))}",
        f"{escaped(in_words(provenance))}. Commit {commit}, {provenance['date']}.",
        f"```console\n$ {provenance['command']}\n```",
        "Bold: a slowdown or a failure. (?): the repeats disagree, or there are too few observations.",
    ]
    if provenance["interrupted"]:
        parts.append("**Interrupted: only repeats that every method completed are counted.**")
    for sheet in sheets(results, columns, sections):
        parts += [f"## {capitalised(sheet.title)}", markdown_table(sheet)]
        if sheet.meaning:
            parts.append(sheet.meaning)
    errors = ["- " + escaped(_FAILED.format(**each)) for each in errors_of(results)]
    if errors:
        parts += ["## Failures", "\n".join(errors)]
    return "\n\n".join(parts) + "\n"


def errors_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return method, prompt and error of each kind of failure."""
    return [{"method": result["method"], **error} for result in results for error in result["errors"]]


def capitalised(text: str) -> str:
    """Return a title with a capital letter in front; the other letters stay."""
    return text[:1].upper() + text[1:]
