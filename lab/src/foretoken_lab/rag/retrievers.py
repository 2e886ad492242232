"""Retrievers: passages for a query, best first, and the same order for a few cached ones.

    search    all passages   ──► the WIDTH best, by (-score, number)
    best_of   some of them   ──► the best, by the same scores to the last bit

Speculation relies on this: if the best of all passages is among the cached ones, it is the best of these, too (with an
approximate index almost always; verification corrects the rest). A search always computes ``WIDTH`` results, for both
methods and any number of queries, so that the first result does not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foretoken.core.errors import ConfigError, InputError
from foretoken_lab.rag.config import FURTHER, WIDTH
from foretoken_lab.rag.encoders import Encoder
from foretoken_lab.rag.passages import Passage

_WORD = re.compile(r"\w+")
# number of queries from which faiss multiplies matrices (a setting of the process): one product costs as much as two
# scans, for any number of queries; the default of faiss 1.15 scans once per query for up to 128,000
_AS_PRODUCT = 3
_LINKS, _CONSTRUCTION, _CANDIDATES = 64, 40, 64  # parameters of HNSW; the last must be at least WIDTH


class Retriever(Protocol):
    """Finds passages.

    Attributes:
        name: "flat", "hnsw" or "bm25".
        size: number of passages.
    """

    name: str
    size: int

    def query(self, text: str) -> Any:
        """Encode a text for the search; the result is reused."""
        ...

    def search(self, queries: Sequence[Any]) -> list[list[int]]:
        """Return for each query the numbers of the ``WIDTH`` best passages (or of all, if fewer), best first."""
        ...

    def best_of(self, query: Any, numbers: Sequence[int]) -> int:
        """Return the best of some passages, at least one."""
        ...


class DenseRetriever:
    """Dense retrieval: inner products of unit vectors by faiss, exact (``flat``) or over a graph (``hnsw``).

    The rounding in faiss depends on the number of queries and of threads. This class therefore scores its candidates
    again, each pair alone, and orders equal scores by number. If passages outside of the candidates of ``flat`` may tie
    with the last result (copies of one text), a second search includes all of them. The graph of ``hnsw`` is searched
    for each query alone, so the result is always the same.

    Args:
        name: "flat" or "hnsw".
        vectors: float32 [N, D].
        encoder: encodes queries; it has encoded the vectors.
        graph: file for the graph of ``hnsw``, which one thread builds once. None: not stored.
    Raises:
        ConfigError: faiss is not installed.
        InputError: there are no vectors, or ``graph`` has another number of them.
    """

    def __init__(self, name: str, vectors: np.ndarray, encoder: Encoder, graph: Path | None = None) -> None:
        if not len(vectors):
            raise InputError("the index is empty: there are no passages")
        self.name = name
        self.size = len(vectors)
        self._vectors = vectors
        self._longest = float(np.linalg.norm(vectors, axis=1).max())
        self._encoder = encoder
        self._index = _flat(vectors) if name == "flat" else _graph(vectors, graph)

    def query(self, text: str) -> np.ndarray:
        return self._encoder.encode(text)

    def search(self, queries: Sequence[np.ndarray]) -> list[list[int]]:
        if self.name == "hnsw":
            _, found = self._index.search(np.stack(queries), min(WIDTH, self.size))
            return [
                self._ranked(query, [int(each) for each in row if each >= 0])
                for query, row in zip(queries, found, strict=True)
            ]
        scores, found = self._index.search(np.stack(queries), min(WIDTH + FURTHER, self.size))
        return [self._best(*each) for each in zip(queries, found, scores[:, -1], strict=True)]

    def best_of(self, query: np.ndarray, numbers: Sequence[int]) -> int:
        return self._ranked(query, numbers)[0]

    def _best(self, query: np.ndarray, candidates: np.ndarray, least: float) -> list[int]:
        """Return the ``WIDTH`` best passages of all.

        Args:
            candidates: the passages from faiss.
            least: the lowest of their scores, with faiss's rounding.
        """
        ranked = self._ranked(query, candidates.tolist())[:WIDTH]
        if len(candidates) < self.size:
            last = float(np.dot(self._vectors[ranked[-1]], query))
            bound = last - rounding(len(query), self._longest * float(np.linalg.norm(query)))
            if least >= bound:  # a passage outside of the candidates may be as good
                _, _, wide = self._index.range_search(query[None], bound)
                ranked = self._ranked(query, wide.tolist())[:WIDTH]
        return ranked

    def _ranked(self, query: np.ndarray, numbers: Sequence[int]) -> list[int]:
        scored = [(-float(np.dot(self._vectors[number], query)), number) for number in numbers]
        return [number for _, number in sorted(scored)]


class Bm25Retriever:
    """BM25 by bm25s, over words in lower case.

    bm25s orders equal scores arbitrarily; this class orders them by number. A query without a known word returns the
    first passages.

    Args:
        passages: at least one.
    Raises:
        ConfigError: bm25s is not installed.
        InputError: there are no passages.
    """

    name = "bm25"

    def __init__(self, passages: Sequence[Passage]) -> None:
        if not passages:
            raise InputError("the index is empty: there are no passages")
        try:
            import bm25s  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError(
                "retriever bm25 needs the package bm25s: pip install 'foretoken-lab[retrieval]'"
            ) from None
        self.size = len(passages)
        self._bm25: Any = bm25s.BM25()
        self._bm25.index([words(each.text) or [""] for each in passages], show_progress=False)
        self._ids: dict[str, int] = self._bm25.vocab_dict
        scores = self._bm25.scores
        self._data, self._passages, self._begins = scores["data"], scores["indices"], scores["indptr"]

    def query(self, text: str) -> list[int]:
        return [self._ids[word] for word in words(text) if word in self._ids]

    def search(self, queries: Sequence[list[int]]) -> list[list[int]]:
        return [self._search(query) for query in queries]

    def best_of(self, query: list[int], numbers: Sequence[int]) -> int:
        return min(numbers, key=lambda number: (-self.score(query, number), number))

    def score(self, query: list[int], number: int) -> float:
        """Score one passage: sum its postings in the order of the query, like bm25s."""
        total = np.float32(0.0)
        for word in query:
            begin, end = self._begins[word], self._begins[word + 1]
            at = begin + np.searchsorted(self._passages[begin:end], number)
            if at < end and self._passages[at] == number:
                total += self._data[at]
        return float(total)

    def _search(self, query: list[int]) -> list[int]:
        if not query:
            return list(range(min(WIDTH, self.size)))
        scores = self._bm25.get_scores_from_ids(query)
        if self.size > WIDTH:
            least = np.partition(scores, self.size - WIDTH)[self.size - WIDTH]
            above = np.flatnonzero(scores > least)
            numbers = np.concatenate([above, np.flatnonzero(scores == least)[: WIDTH - len(above)]])
        else:
            numbers = np.arange(self.size)
        return [int(number) for number in numbers[np.lexsort((numbers, -scores[numbers]))]]


def words(text: str) -> list[str]:
    """Split a text into BM25's terms."""
    return _WORD.findall(text.lower())


def load_faiss() -> Any:
    """Import the package.

    Raises:
        ConfigError: it is not installed; the message has the command.
    """
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            "dense retrieval needs the package faiss-cpu: pip install 'foretoken-lab[retrieval]'"
        ) from None
    faiss.cvar.distance_compute_blas_threshold = _AS_PRODUCT
    return faiss


def rounding(width: int, size: float) -> float:
    """Bound the difference of two float32 sums of the same ``width`` products with magnitudes that sum to ``size``."""
    return (width + 4) * float(np.finfo(np.float32).eps) * size


def _flat(vectors: np.ndarray) -> Any:
    index = load_faiss().IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


def _graph(vectors: np.ndarray, path: Path | None) -> Any:
    faiss = load_faiss()
    if path is not None and path.is_file():
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise InputError(f"{path}: damaged ({str(error).splitlines()[0][:120]}); remove it") from None
        if (index.ntotal, index.d) != vectors.shape:
            raise InputError(f"{path}: a graph of {index.ntotal} vectors, but there are {len(vectors)}: remove it")
    else:
        threads = faiss.omp_get_max_threads()
        index = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _CONSTRUCTION
        faiss.omp_set_num_threads(1)  # several threads would insert in a random order
        try:
            index.add(vectors)
        finally:
            faiss.omp_set_num_threads(threads)
        if path is not None:
            unfinished = path.with_name(f".{path.name}.unfinished")
            faiss.write_index(index, str(unfinished))
            unfinished.replace(path)
    index.hnsw.efSearch = _CANDIDATES
    return index
