"""Passages to retrieve, without duplicate texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import InputError
from foretoken_lab.records import placed_records


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage; retrievers identify it by its index in the list.

    Attributes:
        name: the record's id.
        text: the text, after its title if there is one.
    """

    name: str
    text: str


def read_passages(path: Path) -> list[Passage]:
    """Read a JSON Lines file with ``text``, and optionally ``id`` and ``title``; keep the first of equal texts.

    Raises:
        InputError: the file is not usable, or has no passage.
    """
    found: dict[str, Passage] = {}
    for number, (place, record) in enumerate(placed_records(path, ("text",))):
        text, title = record["text"], record.get("title")
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{place}: field 'text' must be a non-empty string")
        text = f"{title}\n{text}" if isinstance(title, str) and title else text
        found.setdefault(text, Passage(str(record.get("id", number)), text))
    if not found:
        raise InputError(f"{path}: no passages in this file: write one JSON object per line, with 'text'")
    return list(found.values())


def digest(passages: Iterable[Passage]) -> str:
    """Return a fingerprint of the texts in their order."""
    state = hashlib.sha256()
    for passage in passages:
        state.update(hashlib.sha256(passage.text.encode()).digest())
    return state.hexdigest()
