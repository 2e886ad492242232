"""The options of iterative retrieval-augmented generation, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.core.errors import ConfigError, nearest

METHODS = ("sequential", "ralmspec")
RETRIEVERS = ("flat", "hnsw", "bm25", "knn")
KNN = ("neighbours", "weight", "temperature", "locality")  # options that ``knn`` alone has
WIDTH = 24  # results of every search, whoever asks: an approximate search for fewer may find another first one
MOST_STRIDE = 16


@dataclass(frozen=True, kw_only=True)
class RagConfig:
    """How often to retrieve, and how to speculate on what will be found.

    The text depends on the first five, and of ``knn`` on the last four; never on the others.

    Attributes:
        every: tokens that are written under one passage (k).
        query_tokens: last tokens of question and answer that are the query.
        document_tokens: of a passage at most; less where the context has no room.
        timeout: seconds for one search; None waits for ever.
        on_failure: what a request does whose search raises or times out: 'error' ends it, with the tokens so far;
            'fallback' goes on under the last passage that was found, without further searches.
        stride: steps that are guessed before one search verifies them; 'auto' chooses by measured costs (OS3).
        prefetch: passages of every search that enter the request's cache.
        asynchronous: guess one step more while the search runs.
        neighbours: ``knn``: entries that vote.
        weight: ``knn``: of their vote, against the model's law.
        temperature: ``knn``: of the squared distance of unit vectors, from 0 to 4.
        locality: ``knn``: entries behind a found one that enter the cache with it.
    """

    every: int = 4
    query_tokens: int = 32
    document_tokens: int = 256
    timeout: float | None = None
    on_failure: str = "error"
    stride: int | str = "auto"
    prefetch: int = 20
    asynchronous: bool = True
    neighbours: int = 16
    weight: float = 0.25
    temperature: float = 0.05
    locality: int = 10

    def __post_init__(self) -> None:
        for name, most in (
            ("every", 1024),
            ("query_tokens", 1024),
            ("document_tokens", 65536),
            ("prefetch", WIDTH),
            ("neighbours", 1024),
        ):
            _whole(name, getattr(self, name), 1, most)
        _whole("locality", self.locality, 0, 1024)
        if self.stride != "auto":
            _whole("stride", self.stride, 1, MOST_STRIDE, " or 'auto'")
        if not isinstance(self.asynchronous, bool):
            raise ConfigError(f"asynchronous={self.asynchronous!r} must be true or false")
        if self.on_failure not in ("error", "fallback"):
            raise ConfigError(f"on_failure={self.on_failure!r} must be error or fallback")
        if not _number(self.weight) or not 0 <= self.weight <= 1:
            raise ConfigError(f"weight={self.weight!r} must be a share between 0 and 1")
        if not _number(self.temperature) or not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature!r} must be a number above 0")
        if self.timeout is not None and not (_number(self.timeout) and self.timeout > 0):
            raise ConfigError(f"timeout={self.timeout!r} must be a number of seconds above 0; leave it out to wait")


def check_names(retriever: Any, method: str) -> None:
    """Refuse unknown names; a retriever may also be an object.

    Raises:
        ConfigError: with the nearest known one.
    """
    if isinstance(retriever, str) and retriever not in RETRIEVERS:
        raise ConfigError(f"retriever '{retriever}' is unknown: {nearest(retriever, RETRIEVERS)}")
    if method not in METHODS:
        raise ConfigError(f"method '{method}' is unknown: {nearest(method, METHODS)}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int, most: int, further: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r} must be an integer between {least} and {most}{further}")
