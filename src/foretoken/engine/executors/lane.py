"""A lane: one thread beside the engine's, with native threads of its own, that does one thing at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Generic, TypeVar

import torch

from foretoken.engine.executors.timeline import Timeline
from foretoken.native.team import Team

_Result = TypeVar("_Result")
_DRAFTS_SHARE = 8  # one thread of so many is the drafter's: a small model gains little from more


class Ticket(Generic[_Result]):
    """Something that a lane is doing.

    Args:
        future: gives what was done.
        stopped: asks it to come to an end; it looks when it can.
    """

    def __init__(self, future: Future[_Result], stopped: threading.Event) -> None:
        self._future = future
        self._stopped = stopped

    def stop(self) -> None:
        """Ask for what is there; what is being computed is finished first."""
        self._stopped.set()

    def take(self) -> _Result:
        """Wait until the lane rests; what it gives, or the error that it ended with."""
        return self._future.result()

    def rest(self) -> None:
        """Stop it, and wait until the lane rests, whatever becomes of it; an interrupt waits with it."""
        self.stop()
        self._future.exception()


class Lane:
    """A thread that works on a team of its own, so that native forwards here and there overlap.

    Nothing is started before the first order, nor in a child of a fork, where threads are gone.

    Args:
        threads: of its team.

    Attributes:
        timeline: told when it was busy; None: nobody wants to know.
    """

    def __init__(self, threads: int) -> None:
        self.team = Team(threads)
        self.timeline: Timeline | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def begin(self, work: Callable[[Callable[[], bool]], _Result]) -> Ticket[_Result]:
        """Do something. It is given a function that says whether it has been asked to stop."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(1, thread_name_prefix="foretoken-lane"), os.getpid()
        stopped = threading.Event()
        return Ticket(self._pool.submit(self._run, work, stopped.is_set), stopped)

    def close(self) -> None:
        """End the thread, after what it is doing."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None
        self.team.close()

    def _run(self, work: Callable[[Callable[[], bool]], _Result], stopped: Callable[[], bool]) -> _Result:
        began = perf_counter()
        try:
            with self.team:
                return work(stopped)
        finally:
            if self.timeline is not None:
                self.timeline.add("drafter", began, perf_counter())


def split(threads: int | None = None) -> tuple[int, int]:
    """Threads for the target and for the drafter, of those that torch uses unless told; at least one each."""
    threads = torch.get_num_threads() if threads is None else threads
    drafts = max(1, threads // _DRAFTS_SHARE)
    return max(1, threads - drafts), drafts
