"""A table of text, written for a terminal, as Markdown, or (``page.html``) as HTML.

Headings are whole words, which may stand below each other but are never cut. Slowdowns and failures are written like
everything else, and marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

DASH = "–"
_NAME = 11  # columns that a name may be folded to in a terminal


@dataclass(frozen=True)
class Cell:
    """A value as it is printed.

    Attributes:
        bad: a slowdown or a failure.
        doubtful: the repeats lie on both sides of what would be good, or too little was observed.
    """

    text: str
    bad: bool = False
    doubtful: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: above it.
        meaning: a sentence or two on how to read it.
        heads: of the columns.
        rows: as many cells each.
        labels: how many of the first columns hold names.
    """

    title: str
    meaning: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    labels: int = 1


def number(value: float | None, form: str = "{:.2f}") -> Cell:
    """A number, or a dash where it is not known."""
    return Cell(DASH if value is None else form.format(value))


def milliseconds(found: Mapping[str, float] | None, name: str) -> Cell:
    """One of the quantiles of something in seconds."""
    value = None if found is None else 1e3 * found[name]
    return number(value, "{:.0f}" if value is not None and value >= 100 else "{:.1f}")


def megabytes(value: float | None) -> Cell:
    """Bytes as 10^6 of them."""
    return number(None if value is None else value / 1e6, "{:.1f}")


def terminal_table(sheet: Sheet) -> Table:
    """For a terminal of 80 columns: long names fold, figures do not, and headings wrap between words only."""
    table = Table(
        title=sheet.title,
        title_style="bold",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for place, head in enumerate(sheet.heads):
        named = place < sheet.labels
        width = max(map(len, head.split() or [""]))
        if named:
            table.add_column(head, overflow="fold", min_width=max(width, min(_NAME, _widest(sheet, place))))
        else:
            # a method's name over a column of its own may be folded, words may not
            room = max(min(width, _NAME), _widest(sheet, place))
            table.add_column(head, justify="right", overflow="fold", min_width=room)
    for number, row in enumerate(sheet.rows):
        if number and sheet.labels > 1 and row[0].text:
            table.add_section()
        table.add_row(*(_text(cell) for cell in row))
    return table


def _widest(sheet: Sheet, place: int) -> int:
    return max((len(row[place].text) for row in sheet.rows), default=0)


def _text(cell: Cell) -> Text:
    return Text(cell.text, style="bold red" if cell.bad else "yellow" if cell.doubtful else "")


def markdown_table(sheet: Sheet) -> str:
    """As Markdown: bold is bad, (?) is doubtful."""
    rule = ["---" if place < sheet.labels else "---:" for place in range(len(sheet.heads))]
    rows = [[escaped(head) for head in sheet.heads], rule, *([_marked(cell) for cell in row] for row in sheet.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _marked(cell: Cell) -> str:
    text = escaped(cell.text)
    return f"**{text}**" if cell.bad else f"{text} (?)" if cell.doubtful else text


def escaped(text: str) -> str:
    """Text in one line of Markdown, its marks as they are."""
    for mark in "\\`*_|<>":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
