"""The text that ``foretoken calibrate`` reads: checked before a model is loaded, and counted while it is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from foretoken.cli.learn.training import counting as counting_up
from foretoken.core.files import check_readable

T = TypeVar("T")

_CHECKED_DOCUMENTS = 10_000  # of each file, before a model is loaded for them


def counted(pieces: Iterable[T], size: Callable[[T], int], title: str, total: int) -> Iterator[T]:
    """The same pieces; says how much has gone by, of about a total."""
    done = 0
    with counting_up(title, total) as report:
        for piece in pieces:
            yield piece
            done += size(piece)
            report(done)


def check_corpus(corpus: Sequence[Path]) -> None:
    """Refuse a corpus that cannot be read.

    Raises:
        ConfigError, InputError: a file is missing or unreadable.
    """
    for path in corpus:
        check_readable(path, "--corpus")


def check_documents(corpus: Sequence[Path]) -> None:
    """Read the first records of every file, so that a bad one is refused before a model is loaded for them."""
    from foretoken.data.documents import documents

    for path in corpus:
        for _ in itertools.islice(documents(path), _CHECKED_DOCUMENTS):
            pass
