"""What one request of retrieval-augmented generation has cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """Counters of one request.

    Attributes:
        retrievals: searches; one may have many queries.
        queries: of all searches.
        steps: pieces of text written under one passage each, thrown away ones included.
        guesses, right_guesses: passages (of ``knn`` tokens) that were guessed and then verified.
        rollbacks: rounds in which a guess was wrong.
        discarded_tokens: written and thrown away.
        passages: of the text that stands, one for each step: numbers of passages, -1 for none.
        rows: tokens that the target has read.
        passage_rows: of them, tokens of passages.
        recomputed_rows: of the others, those read more often than once: under another passage, or again after a
            rollback, or thrown away.
        decode_seconds, encode_seconds: of reading and writing, and of making queries.
        search_seconds, waited_seconds: of searches on their thread, and of it what the request waited for.
        strides: of each round.
        failed: the failure after which a request went on without searches.
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
        """Under the names that ``foretoken rag --json`` uses."""
        return asdict(self)
