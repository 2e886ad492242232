"""The benchmark as tables for a terminal. Slowdowns and failures are printed like everything else, in red."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretoken.bench.sheets import Cell, Sheet, sheets
from foretoken.bench.suite import Column, Section

_NAME = 11  # columns that a name may be folded to


def tables(
    results: Sequence[dict[str, Any]], title: str, columns: Sequence[Column] = (), sections: Sequence[Section] = ()
) -> RenderableType:
    """Everything that a run has found; see :func:`foretoken.bench.sheets.sheets`."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    for sheet in sheets(results, columns, sections):
        parts += [Text(), sheet_table(sheet)]
        if sheet.meaning:
            parts.append(Text(sheet.meaning, style="dim"))
    parts += [_error_line(result, error) for result in results for error in result["errors"]]
    return Group(*parts)


def sheet_table(sheet: Sheet) -> Table:
    """Narrow enough for 80 columns: long names fold, figures do not, and headings wrap between words only."""
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


def _error_line(result: dict[str, Any], error: dict[str, str]) -> Text:
    return Text(f"{result['method']}: prompt {error['prompt']} failed: {error['error']}", style="red")
