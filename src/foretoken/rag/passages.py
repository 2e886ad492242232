"""What can be retrieved: passages, each text once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import InputError
from foretoken.data.readers import read_placed_records


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage; its number in the list is what retrievers call it.

    Attributes:
        name: of the record.
        text: with its title, where it has one.
    """

    name: str
    text: str


def read_passages(path: Path) -> list[Passage]:
    """The records of a JSON Lines file with ``text``, and perhaps ``id`` and ``title``; of equal texts the first.

    Raises:
        InputError: the file cannot be used, or holds no passage.
    """
    found: dict[str, Passage] = {}
    for number, (place, record) in enumerate(read_placed_records(path, ("text",))):
        text, title = record["text"], record.get("title")
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{place}: field 'text' must be a string with something in it")
        text = f"{title}\n{text}" if isinstance(title, str) and title else text
        found.setdefault(text, Passage(str(record.get("id", number)), text))
    if not found:
        raise InputError(f"{path}: no passages in this file: write one JSON object a line, with 'text'")
    return list(found.values())


def digest(passages: Iterable[Passage]) -> str:
    """A fingerprint of the texts in their order."""
    state = hashlib.sha256()
    for passage in passages:
        state.update(hashlib.sha256(passage.text.encode()).digest())
    return state.hexdigest()
