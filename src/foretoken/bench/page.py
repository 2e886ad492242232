"""A benchmark's report in three forms: for a terminal, as Markdown, and as HTML with charts (``page.html``).

All have the same tables (sheets.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from rich.console import Group, RenderableType
from rich.text import Text

from foretoken.bench.harness import BASELINE
from foretoken.bench.sheets import in_words, settings_of, sheets
from foretoken.bench.suite import Column, Section
from foretoken.bench.table import Cell, escaped, markdown_table, terminal_table

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
    parts += [Text(_FAILED.format(**each), style="red") for each in _errors(results)]
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
        parts += [f"## {_capital(sheet.title)}", markdown_table(sheet)]
        if sheet.meaning:
            parts.append(sheet.meaning)
    errors = ["- " + escaped(_FAILED.format(**each)) for each in _errors(results)]
    if errors:
        parts += ["## Failures", "\n".join(errors)]
    return "\n\n".join(parts) + "\n"


def html_page(
    results: Sequence[dict[str, Any]],
    provenance: dict[str, Any],
    samples: Sequence[Mapping[str, Any]] = (),
    columns: Sequence[Column] = (),
    sections: Sequence[Section] = (),
) -> str:
    """Format as one self-contained HTML file; needs matplotlib (extra ``report``).

    Args:
        results: results of :func:`foretoken.bench.summary.summarise`, concatenated over the settings.
        provenance: result of :func:`foretoken.core.provenance.provenance`.
        samples: result of :func:`foretoken.bench.samples.side_by_side`.
        columns, sections: additions of a suite; see :func:`foretoken.bench.sheets.sheets`.
    """
    from foretoken.bench.pictures import Picture, pictures

    drawn, parts = pictures(results), []
    for sheet in sheets(results, columns, sections):
        picture = drawn.get(sheet.title, Picture(_capital(sheet.title), "", ""))
        parts.append({**picture._asdict(), "figures": Markup(picture.figures), "sheet": sheet})
    return _template().render(
        title=f"foretoken bench: {provenance['model']}",
        lead=_lead(results),
        interrupted=provenance["interrupted"],
        facts=in_words(provenance),
        parts=parts,
        errors=list(_errors(results)),
        samples=samples,
        provenance=[(key.replace("_", " "), _in_a_line(value)) for key, value in provenance.items()],
    )


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"marked": _marked, "unbroken": _unbroken}
    return environment.get_template("page.html")


def _errors(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{"method": result["method"], **error} for result in results for error in result["errors"]]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lead(results: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about the fastest method."""
    measured = [result for result in results if result["method"] != BASELINE and result["speedup"] is not None]
    if not measured:
        return "Only plain decoding was measured."
    best = max(measured, key=lambda result: result["speedup"])
    where = "" if len(settings_of(results)) < 2 else f", at batch {best['batch_size']}"
    lead = Markup("Fastest: <strong>{}</strong>, {:.2f} times plain decoding{}.")
    if best["speedup"] < 1:
        lead = Markup("No method was faster than plain decoding; {} reached {:.2f}x.")
    lead = lead.format(best["method"], best["speedup"], where)
    if best["num_repeats"] < 2:
        lead += " It was measured once, so the variation between runs is unknown."
    return lead


def _in_a_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {part}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _unbroken(head: str) -> Markup:
    """Wrap a heading between words, but not at a hyphen."""
    return escape(head).replace("-", Markup("&#8209;"))


def _marked(cell: Cell) -> Markup:
    kind = "bad" if cell.bad else "doubtful" if cell.doubtful else ""
    text = escape(cell.text).replace("+", Markup("<wbr>+"))  # a method's name may break here
    return Markup('<span class="{}">{}</span>').format(kind, text) if kind else text
