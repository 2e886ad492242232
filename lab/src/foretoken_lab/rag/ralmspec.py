"""RaLMSpec: guess passages from the request's cache, continue to generate, and verify many guesses with one search.

passage   d (known)     guess 1      guess 2                    the results of a request's searches are cached
text      k tokens      k tokens     k tokens   k tokens ...    a guess is the best of the cache
queries             q1           q2         q3
                    └────── one search ─────┘  meanwhile: one more step
verify    best(q1) == guess 1?   best(q2) == guess 2?   …       the text is cut at the first wrong one
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from foretoken_lab.rag.config import RagConfig
from foretoken_lab.rag.search import SearchFailed
from foretoken_lab.rag.sequential import Searcher, go_on_without
from foretoken_lab.rag.session import NO_PASSAGE, Session
from foretoken_lab.rag.stride import Strides


@dataclass(slots=True)
class _Guess:
    """A guessed passage for the text after a query, and the position of that text."""

    query: Any
    passage: int
    length: int


class _Run:
    """One running request.

    Args:
        session, searcher, strides, config: see :func:`run`.
        seen: results of the first search.
    """

    def __init__(
        self, session: Session, searcher: Searcher, strides: Strides, config: RagConfig, seen: list[int]
    ) -> None:
        self._session = session
        self._searcher = searcher
        self._strides = strides
        self._config = config
        self._cache: dict[int, None] = {}  # passages, in the order of retrieval
        self.passage = seen[0]  # passage of the next step
        self.verified = seen[0]  # passage of the last verified text, or of its continuation
        self.remember(seen)

    def remember(self, found: list[int]) -> None:
        self._cache.update(dict.fromkeys(found[: self._config.prefetch]))

    def step(self) -> _Guess | None:
        """Generate with the current passage and guess the next one; None at the end of the text."""
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
        """Guess, verify, and cut the text at the first wrong guess.

        Args:
            begun: the guess after a step made during the last search; its text is already verified.
        Returns:
            the first guess of the next round; None at the end of the text.
        Raises:
            SearchFailed: the text is cut to its verified part.
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
        # the guess after the last step has no text yet, unless a step runs during the search
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
        """Compare guesses and results; ``written`` steps follow the last guess."""
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
        """Cut the text at the first wrong guess."""
        finished_behind_guess = self._session.finished and not written
        steps = len(guesses) - 1 - wrong + written + finished_behind_guess
        self._session.roll_back(guesses[wrong].length, steps)


def run(session: Session, searcher: Searcher, strides: Strides, config: RagConfig) -> None:
    """Generate a whole answer: the text equals that of ``sequential.run`` with the same retriever.

    Paper:   Zhang et al. 2024, RaLMSpec, arXiv:2401.14021: speculative retrieval with prefetching, the optimal stride
             and asynchronous verification.
    Exact:   the text equals the baseline's: every passage used for text is verified before the text is returned.
    Differs: passages are compared by number, not by text. The step during the search is real and runs on the calling
             thread. Its guess enters the next round's search.
    Raises:
        SearchFailed: a search failed, and the config ends the request in that case; the verified text stays.
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
