"""The benchmark as a page of Markdown: the tables of the terminal, and what it takes to run it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.sheets import Cell, Sheet, in_words, sheets
from foretoken.bench.suite import Column, Section


def markdown_page(
    results: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
    columns: Sequence[Column] = (),
    sections: Sequence[Section] = (),
) -> str:
    """The whole page.

    Args:
        results: what :func:`foretoken.bench.summary.summarise` returned.
        provenance: what :func:`foretoken.core.provenance.provenance` returned.
        columns, sections: a suite's own; see :func:`foretoken.bench.sheets.sheets`.
    """
    commit = provenance.get("commit") or "of an installed package"
    parts = [
        f"# foretoken bench: {_escape(str(provenance['model']))}",
        f"{_escape(in_words(provenance))}. Commit {commit}, {provenance['date']}.",
        f"```console\n$ {provenance['command']}\n```",
        "Bold is a slowdown or a failure; (?) stands where the repeats disagree, or where too little was observed.",
    ]
    if provenance["interrupted"]:
        parts.append("**Interrupted: only what every method had finished is counted.**")
    for sheet in sheets(results, columns, sections):
        parts += [f"## {sheet.title[:1].upper()}{sheet.title[1:]}", _table(sheet)]
        if sheet.meaning:
            parts.append(sheet.meaning)
    errors = [
        f"- {_escape(result['method'])}: prompt {_escape(error['prompt'])} failed: {_escape(error['error'])}"
        for result in results
        for error in result["errors"]
    ]
    if errors:
        parts += ["## Failures", "\n".join(errors)]
    return "\n\n".join(parts) + "\n"


def _table(sheet: Sheet) -> str:
    rule = ["---" if place < sheet.labels else "---:" for place in range(len(sheet.heads))]
    rows = [[_escape(head) for head in sheet.heads], rule, *([_cell(cell) for cell in row] for row in sheet.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(cell: Cell) -> str:
    text = _escape(cell.text)
    return f"**{text}**" if cell.bad else f"{text} (?)" if cell.doubtful else text


def _escape(text: str) -> str:
    for mark in "\\`*_|<>":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
