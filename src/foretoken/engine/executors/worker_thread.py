"""A worker thread next to the engine's thread, with native threads of its own; it runs one task at a time."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from foretoken.native.team import Team

_Result = TypeVar("_Result")
_DRAFTER_SHARE = 8  # one of so many threads is the drafter's: a small model gains little from more


class Task(Generic[_Result]):
    """A task of a worker thread.

    Args:
        future: of its result.
        stopped: asks it to end early; the task checks it when it can.
    """

    def __init__(self, future: Future[_Result], stopped: threading.Event) -> None:
        self._future = future
        self._stopped = stopped

    def stop(self) -> None:
        """Ask the task to end early; the current computation is finished first."""
        self._stopped.set()

    def result(self) -> _Result:
        """Wait for the task; returns its result, or raises its error."""
        return self._future.result()

    def stop_and_wait(self) -> None:
        """Stop the task and wait until it has ended, whatever its outcome; also when interrupted meanwhile."""
        self.stop()
        self._future.exception()


class WorkerThread:
    """A thread with a team of native threads, so that native forwards here and in the engine's thread overlap.

    The thread starts with its first task, and again in the child of a fork, which does not inherit threads.

    Args:
        threads: of its team.
    """

    def __init__(self, threads: int) -> None:
        self.team = Team(threads)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def begin(self, work: Callable[[Callable[[], bool]], _Result]) -> Task[_Result]:
        """Start a task. Its argument is a function that returns whether the task should stop."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(1, thread_name_prefix="foretoken-worker"), os.getpid()
        stopped = threading.Event()
        return Task(self._pool.submit(self._run, work, stopped.is_set), stopped)

    def close(self) -> None:
        """End the thread after its current task."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None
        self.team.close()

    def _run(self, work: Callable[[Callable[[], bool]], _Result], stopped: Callable[[], bool]) -> _Result:
        with self.team:
            return work(stopped)


def split(threads: int | None = None) -> tuple[int, int]:
    """Share threads between target and drafter, at least one each.

    Args:
        threads: None: as many as torch uses.
    """
    threads = torch.get_num_threads() if threads is None else threads
    drafts = max(1, threads // _DRAFTER_SHARE)
    return max(1, threads - drafts), drafts
