"""Teams of native threads: forwards of two teams overlap, those of one follow each other.

    with Team(threads=1):             forwards of this Python thread run on a thread of their own
        draft.forward(...)

Every forward outside of such a block runs on one shared team, with as many threads as torch uses, but no more than this
process has cores. A team starts its threads at its first forward; they are not copied by a fork, and a child starts new
ones when it needs them.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import lru_cache
from typing import Any

import torch

from foretoken.core.threads import one_thread, usable_cores

_cores = lru_cache(maxsize=1)(usable_cores)
_current: "ContextVar[Team | None]" = ContextVar("team", default=None)


class _Handle:
    """A native team, freed with the last reference: a forward that is under way holds one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._free = library.foretoken_team_free
        self.address: int | None = library.foretoken_team_new()
        if not self.address:
            raise MemoryError("there is no memory for a team of threads")

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", None), None
        if address:
            self._free(address)


class Team:
    """Threads and working memory for native forwards.

    Args:
        threads: the calling thread included; None: torch's number of threads, read at every forward, as far as there
            are cores for them.
    Raises:
        ValueError: fewer than one thread.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: a team has one thread at least, the caller")
        self._threads = threads
        self._handle: _Handle | None = None
        self._closed = False
        self._before: list[Token[Team | None]] = []

    @property
    def threads(self) -> int:
        """Threads of the next forward."""
        return min(torch.get_num_threads(), _cores()) if self._threads is None else self._threads

    def handle(self, library: ctypes.CDLL) -> _Handle:
        """The library's handle of the team, made at its first forward; hold it while a forward runs.

        Raises:
            RuntimeError: the team has been closed.
        """
        if self._closed:
            raise RuntimeError("the team is closed: make another one")
        handle = self._handle
        if handle is None or handle.library is not library:
            handle = self._handle = _Handle(library)
        return handle

    def close(self) -> None:
        """End the threads, after a forward that is under way."""
        self._handle, self._closed = None, True

    def __enter__(self) -> "Team":
        self._before.append(_current.set(self))
        return self

    def __exit__(self, *error: Any) -> None:
        _current.reset(self._before.pop())


def current() -> Team:
    """The team of the innermost ``with`` block of this Python thread, else the shared one."""
    return _current.get() or _shared()


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Run torch on one thread inside, and native code on as many as before.

    After every operation that they have shared, torch's threads spin for a while on the cores that packing needs: half
    of the processor time of loading 1 B parameters on a busy machine.
    """
    with Team(current().threads), one_thread():
        yield


@lru_cache(maxsize=1)
def _shared() -> Team:
    return Team()
