"""Tables of options for the documentation, from their declarations; scripts/tables.py writes them into the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from foretoken.options.option import Declared, declared
from foretoken.options.tables import rows_of


def knobs(config: type) -> list[str]:
    """Return the table of a method card."""
    rows = [(f"`{row['name']}`", _default(row["default"]), row["help"]) for row in rows_of(config)]
    return markdown(("knob", "default", "meaning"), rows)


def parameters(cls: type, *, over_http: bool = False) -> list[str]:
    """Return the table of a set of options.

    Args:
        over_http: whether HTTP requests accept them.
    """
    rows = [
        (f"`{each.name}`", _default(each.default), _places(each, over_http), _meaning(each)) for each in declared(cls)
    ]
    return markdown(("option", "default", "also as", "meaning"), rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format the lines of a table; bars in its cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _meaning(each: Declared) -> str:
    words = f"{each.option.help} {each.option.more}".rstrip()
    option = each.option
    bounded = any(bound is not None for bound in (option.least, option.most, option.above, option.below))
    if option.convert is not None or not bounded:
        return words
    return f"{words} {each.allowed[:1].upper()}{each.allowed[1:]}."


def _places(each: Declared, over_http: bool) -> str:
    """Return the interfaces of an option in addition to Python."""
    places = [f"`{each.option.flag(each.name)}`"] if each.option.on_command_line else []
    return ", ".join([*places, *(["HTTP"] if over_http and each.option.over_http else [])])


def _default(value: Any) -> str:
    if value == "required":
        return "required"
    plain = not isinstance(value, str) or (value.isprintable() and value == value.strip() != "")
    return f"`{value}`" if plain else f"`{value!r}`"
