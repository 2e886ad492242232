"""A benchmark as one HTML page with pictures (``page.html``): ``foretoken bench --report``.

It has the tables that the terminal has (foretoken/bench/sheets.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from foretoken.bench.harness import BASELINE
from foretoken.bench.page import capitalised, errors_of
from foretoken.bench.sheets import in_words, settings_of, sheets
from foretoken.bench.suite import Column, Section
from foretoken.bench.table import Cell
from foretoken_lab.reports.pictures import Picture, pictures


def html_page(record: Mapping[str, Any], columns: Sequence[Column] = (), sections: Sequence[Section] = ()) -> str:
    """Format as one self-contained HTML file.

    Args:
        record: what ``foretoken bench --out`` writes: ``provenance``, ``results``, ``samples``.
        columns, sections: additions of a suite; see :func:`foretoken.bench.sheets.sheets`.
    """
    results, provenance = record["results"], record["provenance"]
    drawn, parts = pictures(results), []
    for sheet in sheets(results, columns, sections):
        picture = drawn.get(sheet.title, Picture(capitalised(sheet.title), "", ""))
        parts.append({**picture._asdict(), "figures": Markup(picture.figures), "sheet": sheet})
    return _template().render(
        title=f"foretoken bench: {provenance['model']}",
        lead=_lead(results),
        interrupted=provenance["interrupted"],
        facts=in_words(provenance),
        parts=parts,
        errors=errors_of(results),
        samples=record["samples"],
        provenance=[(key.replace("_", " "), _in_a_line(value)) for key, value in provenance.items()],
    )


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"marked": _marked, "unbroken": _unbroken}
    return environment.get_template("page.html")


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
