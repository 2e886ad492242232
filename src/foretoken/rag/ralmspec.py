"""RaLMSpec: guess the passages from what the request has seen, write on, and verify many guesses by one search.

passage   d (known)     guess 1      guess 2                    all found by the searches of a request are cached
text      k tokens      k tokens     k tokens   k tokens ...    a guess is the best of the cache
queries             q1           q2         q3
                    └────── one search ─────┘  next to it: one step more
verify    best(q1) == guess 1?   best(q2) == guess 2?   …       from the first wrong one on the text is cut
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from foretoken.rag.config import RagConfig
from foretoken.rag.search import SearchFailed
from foretoken.rag.sequential import Searcher, go_on_without
from foretoken.rag.session import NO_PASSAGE, Session
from foretoken.rag.stride import Strides


@dataclass(slots=True)
class _Guess:
    """A passage that is guessed for the text after a query, and where that text begins."""

    query: Any
    passage: int
    length: int


class _Run:
    """One request under way.

    Args:
        session, searcher, strides, config: see :func:`run`.
        seen: what the first search has found.
    """

    def __init__(
        self, session: Session, searcher: Searcher, strides: Strides, config: RagConfig, seen: list[int]
    ) -> None:
        self._session = session
        self._searcher = searcher
        self._strides = strides
        self._config = config
        self._cache: dict[int, None] = {}  # passages, in the order in which they were found
        self.passage = seen[0]  # that the next step is written under
        self.verified = seen[0]  # that verified text was written under last, or may go on under
        self.remember(seen)

    def remember(self, found: list[int]) -> None:
        self._cache.update(dict.fromkeys(found[: self._config.prefetch]))

    def step(self) -> _Guess | None:
        """Write under the present passage and guess the next; None where the text is finished."""
        session, began = self._session, time.perf_counter()
        session.decode(self.passage, self._config.every)
        guess = None
        if not session.finished:
            query = self._searcher.query(session)
            self.passage = self._searcher.retriever.best_of(query, list(self._cache))
            guess = _Guess(query, self.passage, session.length)
        self._strides.stepped(time.perf_counter() - began)
        return guess

    def round(self, begun: list[_Guess]) -> list[_Guess] | None:
        """Guess, verify, and cut what was wrong.

        Args:
            begun: the guess after a step that was written next to the last search; its text is verified already.
        Returns:
            what the next round begins with; None at the end of the text.
        Raises:
            SearchFailed: the text is cut to what was verified.
        """
        session, stride = self._session, self._strides.next()
        session.counts.strides.append(stride)
        guesses = list(begun)
        while len(guesses) < stride and not session.finished:
            guess = self.step()
            if guess is not None:
                guesses.append(guess)
        if not guesses:
            return None
        # the guess after the last step has led to no text yet, unless one is written next to the search
        steps = len(session.counts.passages)
        pending = self._searcher.begin(session, [guess.query for guess in guesses])
        beside = not session.finished and self._config.asynchronous
        extra = self.step() if beside else None
        written = len(session.counts.passages) - steps
        try:
            found = self._searcher.result(session, pending)
        except SearchFailed:
            self._cut(guesses, 0, written)
            raise
        return self._judge(guesses, found, extra, written)

    def _judge(
        self, guesses: list[_Guess], found: list[list[int]], extra: _Guess | None, written: int
    ) -> list[_Guess] | None:
        """Compare; ``written`` steps stand after the last guess."""
        session = self._session
        for each in found:
            self.remember(each)
        wrong = next((i for i, guess in enumerate(guesses) if found[i][0] != guess.passage), None)
        tested = len(guesses) if wrong is None else wrong + 1
        session.counts.guesses += tested
        session.counts.right_guesses += tested if wrong is None else wrong
        self._strides.judged(tested if wrong is None else wrong, wrong is not None)
        if wrong is not None:
            session.counts.rollbacks += 1
            self._cut(guesses, wrong, written)
            self.passage = self.verified = found[wrong][0]
            return []
        self.verified = guesses[-1].passage
        if session.finished:
            return None
        return [] if extra is None else [extra]

    def _cut(self, guesses: list[_Guess], wrong: int, written: int) -> None:
        """Cut the text to where the first wrong guess was made."""
        finished_behind_guess = self._session.finished and not written
        steps = len(guesses) - 1 - wrong + written + finished_behind_guess
        self._session.roll_back(guesses[wrong].length, steps)


def run(session: Session, searcher: Searcher, strides: Strides, config: RagConfig) -> None:
    """Write a whole answer: the text of ``sequential.run`` with the same retriever.

    Paper:   Zhang et al. 2024, RaLMSpec, arXiv:2401.14021: speculative retrieval with prefetching, the optimal stride
             and asynchronous verification.
    Exact:   the same text as the baseline's: every query whose passage led to text is verified before it is returned.
    Differs: passages are compared by number, not by text. The step next to the search is real and runs on the calling
             thread. Its guess enters the next round's search.
    Raises:
        SearchFailed: a search failed, and the config says that this ends the request; the verified text stays.
    """
    passage = NO_PASSAGE
    try:
        state = _Run(session, searcher, strides, config, searcher.first(session))
        passage = state.verified
        begun: list[_Guess] | None = []
        while begun is not None:
            begun = state.round(begun)
            passage = state.verified
    except SearchFailed as failure:
        go_on_without(session, passage, failure, config)
