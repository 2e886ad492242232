"""A text table for a terminal, as Markdown, or (``page.html``) as HTML.

Headings wrap between words and are never cut. Slowdowns and failures are printed like other values, and marked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

DASH = "–"
_NAME = 11  # maximum width of a folded name in a terminal


@dataclass(frozen=True)
class Cell:
    """A printed value.

    Attributes:
        bad: a slowdown or a failure.
        doubtful: the repeats lie on both sides of the threshold, or there are too few observations.
    """

    text: str
    bad: bool = False
    doubtful: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: its title.
        meaning: one or two sentences of explanation.
        heads: headings of the columns.
        rows: one cell per column each.
        labels: number of leading columns with names.
    """

    title: str
    meaning: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    labels: int = 1


def number(value: float | None, form: str = "{:.2f}") -> Cell:
    """Format a number; an unknown one as a dash."""
    return Cell(DASH if value is None else form.format(value))


def milliseconds(found: Mapping[str, float] | None, name: str) -> Cell:
    """Format one quantile of a duration in seconds."""
    value = None if found is None else 1e3 * found[name]
    return number(value, "{:.0f}" if value is not None and value >= 100 else "{:.1f}")


def megabytes(value: float | None) -> Cell:
    """Format bytes in units of 10^6."""
    return number(None if value is None else value / 1e6, "{:.1f}")


def terminal_table(sheet: Sheet) -> Table:
    """Format for a terminal of 80 columns: long names fold, figures do not, and headings wrap between words only."""
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
            # fold only names that have a separate column
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
    """Format as Markdown: bold is bad, (?) is doubtful."""
    rule = ["---" if place < sheet.labels else "---:" for place in range(len(sheet.heads))]
    rows = [[escaped(head) for head in sheet.heads], rule, *([_marked(cell) for cell in row] for row in sheet.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _marked(cell: Cell) -> str:
    text = escaped(cell.text)
    return f"**{text}**" if cell.bad else f"{text} (?)" if cell.doubtful else text


def escaped(text: str) -> str:
    """Return text in one line of Markdown, with its special characters escaped."""
    for mark in "\\`*_|<>":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
