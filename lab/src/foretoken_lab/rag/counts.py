"""The costs of one request of retrieval-augmented generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """Counters of one request.

    Attributes:
        retrievals: number of searches; one may have many queries.
        queries: number of queries of all searches.
        steps: pieces of text with one passage each, including discarded ones.
        guesses, right_guesses: verified guesses of passages (with ``knn``: of tokens).
        rollbacks: rounds with a wrong guess.
        discarded_tokens: generated and discarded tokens.
        passages: number of the passage of each step of the final text, -1 for none.
        rows: tokens that the target has processed.
        passage_rows: those of passages.
        recomputed_rows: other rows that were computed more than once: with another passage, after a rollback, or
            discarded.
        decode_seconds, encode_seconds: time of the target, and of encoding queries.
        search_seconds, waited_seconds: time of searches on their thread, and the request's share spent waiting.
        strides: the stride of each round.
        failed: the failure after which a request continued without searches.
    """

    retrievals: int = 0
    queries: int = 0
    steps: int = 0
    guesses: int = 0
    right_guesses: int = 0
    rollbacks: int = 0
    discarded_tokens: int = 0
    passages: list[int] = field(default_factory=list)
    rows: int = 0
    passage_rows: int = 0
    recomputed_rows: int = 0
    decode_seconds: float = 0.0
    encode_seconds: float = 0.0
    search_seconds: float = 0.0
    waited_seconds: float = 0.0
    strides: list[int] = field(default_factory=list)
    failed: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the counts under the names of ``foretoken rag --json``."""
        return asdict(self)
