"""A search concurrent with decoding, on its own thread; a search that hangs or raises fails only its request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from foretoken.core.errors import RequestError
from foretoken_lab.rag.counts import Counts

Found = TypeVar("Found")


class SearchFailed(RequestError):
    """A search raised an error or took too long."""


class Pending(Generic[Found]):
    """A running search. Its thread shares no state with the request: a late result is dropped with this object.

    Args:
        search: called on the thread.
        queries: its argument.
    """

    def __init__(self, search: Callable[[Sequence[object]], Found], queries: Sequence[object]) -> None:
        self.num_queries = len(queries)
        self.seconds = 0.0
        self._found: list[Found] = []
        self._error: Exception | None = None
        self._done = threading.Event()

        def run() -> None:
            began = time.perf_counter()
            try:
                self._found.append(search(queries))
            except Exception as error:  # a retriever may raise any error
                self._error = error
            self.seconds = time.perf_counter() - began
            self._done.set()

        # a daemon thread, so that a hanging search does not keep the process alive
        threading.Thread(target=run, name="search", daemon=True).start()

    def result(self, timeout: float | None, counts: Counts) -> Found:
        """Wait for the result.

        Raises:
            SearchFailed: it raised an error, or exceeded the time limit, counted from now.
        """
        began = time.perf_counter()
        done = self._done.wait(timeout)
        counts.waited_seconds += time.perf_counter() - began
        if not done:
            raise SearchFailed(f"the search took longer than timeout={timeout:g} seconds")
        counts.search_seconds += self.seconds
        if self._error is not None:
            raise SearchFailed(f"the search failed ({type(self._error).__name__}: {self._error})")
        return self._found[0]
