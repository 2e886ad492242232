"""kNN-LM: a mixture of the model's distribution and the next tokens of the nearest contexts of a corpus; and
speculation on it.

    key     the model's last state of a context, of unit length        value   the next token
    distribution     weight * vote + (1 - weight) * model                        the next token is its argmax

Retrieval runs for every token. A request caches entries and their successors in the corpus (spatial locality), guesses
tokens by the votes of these, and batches many searches. A guess is right if its *token* is right, for any set of
voters.

Letters: N entries, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.core.errors import InputError, RequestError
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.last_states import LastStates
from foretoken.models.prefill import chunks
from foretoken_lab.rag.config import FURTHER, RagConfig
from foretoken_lab.rag.passages import Passage
from foretoken_lab.rag.retrievers import load_faiss, rounding
from foretoken_lab.rag.search import Pending, SearchFailed
from foretoken_lab.rag.session import NO_PASSAGE, Session
from foretoken_lab.rag.stride import Strides

Neighbours = tuple[np.ndarray, np.ndarray]
"""Numbers of entries, nearest first, and their squared distances."""


class KnnStore:
    """The next token of each context of a corpus.

    Paper:   Khandelwal et al. 2020, kNN-LM, arXiv:1911.00172.
    Differs: keys are unit vectors, so that a temperature has the same meaning for every model.

    Args:
        keys: float32 [N, D], of unit length, in the order of the corpus.
        values: int64 [N].
    Raises:
        InputError: there are no entries.
    """

    name = "knn"

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        if not len(keys):
            raise InputError("the index is empty: the passages hold no two tokens in a row")
        self.keys = keys
        self.values = values
        self._index = load_faiss().IndexFlatL2(keys.shape[1])
        self._index.add(keys)

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(
        cls, target: LanguageModel, passages: Sequence[Passage], report: Callable[[int], None] = lambda count: None
    ) -> KnnStore:
        """Build the store from passages with the target.

        Args:
            report: called with the number of passages so far.
        """
        states = LastStates(target)
        cache = target.new_cache(1)
        keys: list[np.ndarray] = [np.zeros((0, 0), np.float32)]
        values: list[np.ndarray] = [np.zeros(0, np.int64)]
        for number, passage in enumerate(passages, start=1):
            tokens = list(target.tokenizer(passage.text)["input_ids"])[: target.max_length]
            slot = cache.acquire()
            for begin, end, batch in chunks(cache, slot, tokens[:-1]):
                output = target.forward(batch, DensePlan(cache, batch), span=states.span)
                keys.append(unit(states.of(output, range(end - begin)).numpy()))
                values.append(np.array(tokens[begin + 1 : end + 1], np.int64))
            cache.release(slot)
            report(number)
        full = [each for each in keys if len(each)]
        return cls(np.concatenate(full) if full else keys[0], np.concatenate(values))

    def search(self, queries: Sequence[np.ndarray], count: int) -> list[Neighbours]:
        """Return the nearest entries to each query, independent of the number of queries."""
        distances, found = self._index.search(np.stack(queries), min(count + FURTHER, len(self)))
        return [self._nearest(*each, count) for each in zip(queries, found, distances[:, -1], strict=True)]

    def _nearest(self, query: np.ndarray, candidates: np.ndarray, farthest: float, count: int) -> Neighbours:
        """Return the nearest of all entries.

        Equal contexts have equal keys, so any number of entries may tie with the last neighbour, and faiss rounds a
        distance differently for one query and for many. If an entry outside of the candidates may be as near as the
        last neighbour, a second search includes all such entries.

        Args:
            candidates: the entries from faiss.
            farthest: the largest of their distances, with faiss's rounding.
        """
        found = self.nearest(query, candidates, count)
        if len(candidates) < len(self):
            bound = float(found[1][-1]) + rounding(len(query), 4.0)  # |x|^2 + |y|^2 - 2xy of unit vectors
            if farthest <= bound:
                _, _, wide = self._index.range_search(query[None], bound)
                found = self.nearest(query, wide, count)
        return found

    def nearest(self, query: np.ndarray, numbers: np.ndarray, count: int) -> Neighbours:
        """Return the nearest of some entries; each distance is computed alone, and equal ones are ordered by number."""
        distances = np.square(self.keys[numbers] - query).sum(axis=1)
        order = np.lexsort((numbers, distances))[:count]
        return numbers[order], distances[order]

    def token(self, logits_V: np.ndarray, neighbours: Neighbours, config: RagConfig) -> int:
        """Return the argmax of the mixed distribution, in float64."""
        numbers, distances = neighbours
        law_V = np.exp(logits_V - logits_V.max())
        law_V *= (1.0 - config.weight) / law_V.sum()
        votes = np.exp(-(distances - distances[0]).astype(np.float64) / config.temperature)
        np.add.at(law_V, self.values[numbers], config.weight * votes / votes.sum())
        return int(law_V.argmax())


def unit(rows: np.ndarray) -> np.ndarray:
    """Return rows of length 1."""
    found: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return found.astype(np.float32)


@dataclass(slots=True)
class _Step:
    """A guessed token, and the entries that voted for it."""

    query: np.ndarray
    logits_V: np.ndarray
    token: int
    length: int


class KnnRun:
    """Generates answers by kNN-LM.

    Args:
        store: the entries.
        states: the target's last hidden states; with the shelf's span.
        strides: shared by all requests.
        config: the options.
    """

    def __init__(self, store: KnnStore, states: LastStates, strides: Strides, config: RagConfig) -> None:
        self._store = store
        self._states = states
        self._strides = strides
        self._config = config

    def sequential(self, session: Session) -> None:
        """Generate with one search per token.

        Raises:
            SearchFailed: a search failed, and the config ends the request in that case.
        """
        while not session.finished:
            query, logits_V = self._read(session)
            try:
                (neighbours,) = self._search(session, [query])
            except SearchFailed as failure:
                self._go_on_without(session, failure, logits_V)
                return
            session.append(self._store.token(logits_V, neighbours, self._config))

    def ralmspec(self, session: Session) -> None:
        """Generate with one search for many guessed tokens; the text equals that of :meth:`sequential`.

        Paper:   arXiv:2401.14021, section 5.4: spatial locality, and a guess is right if its token is.
        Differs: the first search is for one token, since the cache is empty.
        Raises:
            SearchFailed: a search failed, and the config ends the request in that case.
        """
        known: np.ndarray = np.zeros(0, np.int64)
        while not session.finished:
            stride = self._strides.next() if len(known) else 1
            session.counts.strides.append(stride)
            steps: list[_Step] = []
            while len(steps) < stride and not session.finished:
                steps.append(self._guess(session, known))
            try:
                found = self._search(session, [step.query for step in steps])
            except SearchFailed as failure:
                session.roll_back(steps[0].length, 0)
                self._go_on_without(session, failure, steps[0].logits_V)
                return
            guessing = bool(len(known))
            known = np.union1d(known, self._with_neighbours(found))
            right = self._judge(session, steps, found)
            if guessing:
                self._strides.judged(right, right < len(steps))
                session.counts.guesses += min(right + 1, len(steps))
                session.counts.right_guesses += right
                session.counts.rollbacks += right < len(steps)

    def _guess(self, session: Session, known: np.ndarray) -> _Step:
        """Append the token with the most votes of the known entries; an arbitrary one without entries."""
        began = time.perf_counter()
        length = session.length
        query, logits_V = self._read(session)
        token = int(logits_V.argmax())
        if len(known):
            neighbours = self._store.nearest(query, known, self._config.neighbours)
            token = self._store.token(logits_V, neighbours, self._config)
        session.append(token)
        self._strides.stepped(time.perf_counter() - began)
        return _Step(query, logits_V, token, length)

    def _judge(self, session: Session, steps: Sequence[_Step], found: Sequence[Neighbours]) -> int:
        """Correct the first wrong token; return the number of right ones before it."""
        for number, (step, neighbours) in enumerate(zip(steps, found, strict=True)):
            token = self._store.token(step.logits_V, neighbours, self._config)
            if token != step.token:
                session.roll_back(step.length, 0)
                session.append(token)
                return number
        return len(steps)

    def _with_neighbours(self, found: Sequence[Neighbours]) -> np.ndarray:
        """Add the found entries, and those after each in the corpus."""
        numbers = np.concatenate([numbers for numbers, _ in found])
        reach = np.arange(self._config.locality + 1)
        entries: np.ndarray = (numbers[:, None] + reach).ravel()
        return entries[entries < len(self._store)]

    def _read(self, session: Session) -> tuple[np.ndarray, np.ndarray]:
        """Return the query and the logits of the next token."""
        began = time.perf_counter()
        output: Output = session.follow(NO_PASSAGE)
        query = unit(self._states.of(output, [-1]).numpy())[0]
        logits_V: np.ndarray = output.logits_MV[-1].double().numpy()
        session.counts.decode_seconds += time.perf_counter() - began
        if np.isnan(logits_V).any():
            raise RequestError("the target's logits are NaN")
        return query, logits_V

    def _search(self, session: Session, queries: list[Any]) -> list[Neighbours]:
        count = self._config.neighbours
        session.counts.retrievals += 1
        session.counts.queries += len(queries)
        pending = Pending(lambda each: self._store.search(each, count), queries)  # type: ignore[arg-type]
        found = pending.result(self._config.timeout, session.counts)
        self._strides.searched(len(queries), pending.seconds)
        return found

    def _go_on_without(self, session: Session, failure: SearchFailed, logits_V: np.ndarray) -> None:
        """Generate the rest with the model alone, if the config allows it."""
        if self._config.on_failure == "error":
            raise failure
        session.counts.failed = str(failure)
        while not session.finished:
            session.append(int(logits_V.argmax()))
            if not session.finished:
                _, logits_V = self._read(session)
