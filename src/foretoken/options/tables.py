"""The options of a method as rows, from their declarations: for ``foretoken methods`` and the documentation."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

from foretoken.options.option import declared


def rows_of(config: type | None) -> list[dict[str, Any]]:
    """Return the options of a method for ``foretoken methods``.

    Returns:
        objects with ``name``, ``type``, ``default`` ("required" if there is none) and ``help``; undeclared fields of a
        third-party Config have no help.
    """
    if config is None or not hasattr(config, "__dataclass_fields__"):
        return []
    known = {each.name: each for each in declared(config)}
    rows = []
    for field in fields(config):
        if field.name in known:
            each = known[field.name]
            kind, default, words = _in_words(each.type), each.default, f"{each.option.help} {each.option.more}".rstrip()
        else:
            kind, default, words = _in_words(field.type), field.default, ""
        rows.append(
            {"name": field.name, "type": kind, "default": "required" if default is MISSING else default, "help": words}
        )
    return rows


def _in_words(kind: Any) -> str:
    """Format a type as in source code."""
    if kind is Any:
        return "name"
    return kind.__name__ if isinstance(kind, type) else re.sub(r"[a-z_]+\.(?=[A-Z])|pathlib\.|_local\.", "", str(kind))
