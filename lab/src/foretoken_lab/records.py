"""Records of the corpora, with the fields that a task needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.data.readers import read_placed_records


def placed_records(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file in order, each with its place ``FILE:LINE`` for messages.

    Args:
        path: ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.xz``.
        fields: names that every record must have.
    Raises:
        InputError: the file or one of its lines is invalid; the message has the line, and the missing field.
    """
    for place, record in read_placed_records(path):
        for name in fields:
            if name not in record:
                found = ", ".join(f"'{key}'" for key in list(record)[:6]) or "no fields"
                raise InputError(f"{place}: needs the field '{name}' (found {found})")
        yield place, record


def read_records(path: Path, fields: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the objects of :func:`placed_records` without their places."""
    return (record for _, record in placed_records(path, fields))
