"""The options of iterative retrieval-augmented generation, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.options.option import Checked, Option

METHODS = ("sequential", "ralmspec")
RETRIEVERS = ("flat", "hnsw", "bm25", "knn")
KNN = ("neighbours", "weight", "temperature", "locality")  # options of ``knn`` only
WIDTH = 24  # results of every search, in both methods: an approximate search for fewer may return another first result
FURTHER = 8  # extra results of an exact search by faiss: usually enough to exclude further ties
MOST_STRIDE = 16


@dataclass(frozen=True, kw_only=True)
class RagConfig(Checked):
    """How often to retrieve, and how to speculate on the results.

    The text depends only on the first five options, and with ``knn`` also on the last four.
    """

    every: Annotated[int, Option("Tokens generated per passage (k).", least=1, most=1024)] = 4
    query_tokens: Annotated[
        int, Option("Number of last tokens of question and answer in the query.", least=1, most=1024)
    ] = 32
    document_tokens: Annotated[
        int, Option("Maximum tokens of a passage; fewer if the context is full.", least=1, most=65536)
    ] = 256
    timeout: Annotated[
        float | None,
        Option("Time limit of one search in seconds; None: no limit.", above=0, remedy="leave it out to wait"),
    ] = None
    on_failure: Annotated[
        str,
        Option(
            "error: after a failed search the request ends, with the tokens so far; fallback: it continues "
            "with the last passage found, without further searches.",
            choices=("error", "fallback"),
        ),
    ] = "error"
    stride: Annotated[
        int | str,
        Option(
            "Guessed steps per verifying search; 'auto' chooses by measured costs (OS3).",
            least=1,
            most=MOST_STRIDE,
            choices=("auto",),
        ),
    ] = "auto"
    prefetch: Annotated[
        int, Option("Passages of every search to store in the request's cache.", least=1, most=WIDTH)
    ] = 20
    asynchronous: Annotated[bool, Option("Guess one more step during the search.")] = True
    neighbours: Annotated[int, Option("knn: number of neighbours.", least=1, most=1024)] = 16
    weight: Annotated[
        float, Option("knn: weight of the neighbours' vote, against the model's distribution.", least=0, most=1)
    ] = 0.25
    temperature: Annotated[
        float, Option("knn: temperature of the squared distance of unit vectors, from 0 to 4.", above=0)
    ] = 0.05
    locality: Annotated[
        int, Option("knn: number of entries after a found one to store in the cache.", least=0, most=1024)
    ] = 10


def check_names(retriever: Any, method: str) -> None:
    """Refuse unknown names; a retriever may also be an object.

    Raises:
        ConfigError: the message has the nearest known name.
    """
    if isinstance(retriever, str) and retriever not in RETRIEVERS:
        raise ConfigError(f"retriever '{retriever}' is unknown: {nearest(retriever, RETRIEVERS)}")
    if method not in METHODS:
        raise ConfigError(f"method '{method}' is unknown: {nearest(method, METHODS)}")
