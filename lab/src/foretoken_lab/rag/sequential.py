"""Iterative retrieval-augmented generation: search, generate a few tokens with the best passage, search again."""

from __future__ import annotations

import time
from typing import Any

from foretoken_lab.rag.config import RagConfig
from foretoken_lab.rag.retrievers import Retriever
from foretoken_lab.rag.search import Pending, SearchFailed
from foretoken_lab.rag.session import NO_PASSAGE, Session
from foretoken_lab.rag.stride import Strides


class Searcher:
    """Creates queries from a session and runs their searches.

    Args:
        retriever: shared by all requests.
        strides: records the cost of searches.
        config: sets the timeout.
    """

    def __init__(self, retriever: Retriever, strides: Strides, config: RagConfig) -> None:
        self.retriever = retriever
        self._strides = strides
        self._timeout = config.timeout

    def query(self, session: Session) -> Any:
        """Return the query for the current text."""
        began = time.perf_counter()
        found = self.retriever.query(session.query_text())
        session.counts.encode_seconds += time.perf_counter() - began
        return found

    def begin(self, session: Session, queries: list[Any]) -> Pending[list[list[int]]]:
        """Start a search."""
        session.counts.retrievals += 1
        session.counts.queries += len(queries)
        return Pending(self.retriever.search, queries)

    def result(self, session: Session, pending: Pending[list[list[int]]]) -> list[list[int]]:
        """Return the result of a search.

        Raises:
            SearchFailed: it raised an error, or took too long.
        """
        found = pending.result(self._timeout, session.counts)
        self._strides.searched(pending.num_queries, pending.seconds)
        return found

    def first(self, session: Session) -> list[int]:
        """Return the passages for the current text, best first."""
        return self.result(session, self.begin(session, [self.query(session)]))[0]


def run(session: Session, searcher: Searcher, config: RagConfig) -> None:
    """Generate a whole answer.

    Paper:   the baseline of arXiv:2401.14021 (RaLMSeq), after In-Context RALM, arXiv:2302.00083.
    Differs: keys and values are reused if the text before them is unchanged (session.py); the paper's code recomputes
             all of them at every step.
    Raises:
        SearchFailed: a search failed, and the config ends the request in that case.
    """
    passage = NO_PASSAGE
    while not session.finished:
        try:
            passage = searcher.first(session)[0]
        except SearchFailed as failure:
            go_on_without(session, passage, failure, config)
            return
        session.decode(passage, config.every)


def go_on_without(session: Session, passage: int, failure: SearchFailed, config: RagConfig) -> None:
    """Generate the rest with one passage, if the config allows it.

    Raises:
        SearchFailed: the config does not allow it.
    """
    if config.on_failure == "error":
        raise failure
    session.counts.failed = str(failure)
    while not session.finished:
        session.decode(passage, config.every)
