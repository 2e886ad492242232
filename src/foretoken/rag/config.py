"""The options of iterative retrieval-augmented generation, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.options.option import Checked, Option

METHODS = ("sequential", "ralmspec")
RETRIEVERS = ("flat", "hnsw", "bm25", "knn")
KNN = ("neighbours", "weight", "temperature", "locality")  # options that ``knn`` alone has
WIDTH = 24  # results of every search, whoever asks: an approximate search for fewer may find another first one
FURTHER = 8  # results that an exact search asks faiss for in addition: mostly enough to see that no other one ties
MOST_STRIDE = 16


@dataclass(frozen=True, kw_only=True)
class RagConfig(Checked):
    """How often to retrieve, and how to speculate on what will be found.

    The text depends on the first five, and of ``knn`` on the last four; never on the others.
    """

    every: Annotated[int, Option("Tokens that are written under one passage (k).", least=1, most=1024)] = 4
    query_tokens: Annotated[
        int, Option("Last tokens of question and answer that are the query.", least=1, most=1024)
    ] = 32
    document_tokens: Annotated[
        int, Option("Of a passage at most; fewer where the context has no room.", least=1, most=65536)
    ] = 256
    timeout: Annotated[
        float | None, Option("Seconds for one search; None waits for ever.", above=0, remedy="leave it out to wait")
    ] = None
    on_failure: Annotated[
        str,
        Option(
            "error: a request whose search raises or times out ends, with the tokens so far; fallback: it goes on "
            "under the last passage that was found, without further searches.",
            choices=("error", "fallback"),
        ),
    ] = "error"
    stride: Annotated[
        int | str,
        Option(
            "Steps that are guessed before one search verifies them; 'auto' chooses by measured costs (OS3).",
            least=1,
            most=MOST_STRIDE,
            choices=("auto",),
        ),
    ] = "auto"
    prefetch: Annotated[
        int, Option("Passages of every search that enter the request's cache.", least=1, most=WIDTH)
    ] = 20
    asynchronous: Annotated[bool, Option("Guess one more step while the search runs.")] = True
    neighbours: Annotated[int, Option("knn: entries that vote.", least=1, most=1024)] = 16
    weight: Annotated[float, Option("knn: of their vote, against the model's distribution.", least=0, most=1)] = 0.25
    temperature: Annotated[float, Option("knn: of the squared distance of unit vectors, from 0 to 4.", above=0)] = 0.05
    locality: Annotated[
        int, Option("knn: entries after a found one that enter the cache with it.", least=0, most=1024)
    ] = 10


def check_names(retriever: Any, method: str) -> None:
    """Refuse unknown names; a retriever may also be an object.

    Raises:
        ConfigError: with the nearest known one.
    """
    if isinstance(retriever, str) and retriever not in RETRIEVERS:
        raise ConfigError(f"retriever '{retriever}' is unknown: {nearest(retriever, RETRIEVERS)}")
    if method not in METHODS:
        raise ConfigError(f"method '{method}' is unknown: {nearest(method, METHODS)}")
