"""Stopping a run of training from its first second on: by Ctrl-C, by SIGTERM, or because its time is over.

Python calls a signal's handler between two bytecodes of the main thread. One call of native code may last minutes: a
tokenizer over a corpus, a backward pass of a large model. So a thread is woken by the signal, too:

    main thread    preparation ··· step: forwards and backwards │ optimiser │ ···    the handler raises an exception,
                                   weights stay as they were    │ not cut   │        except where weights change
    this thread    asleep ── signal ── GRACE seconds ── still running? save a checkpoint, report it, end the process
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError

GRACE_SECONDS = 3.0  # that the main thread has to stop by itself
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


class Interrupted(ForetokenError):
    """The run was stopped by its user; the message names the kept files."""

    exit_code = INTERRUPTED


class Cut(BaseException):
    """Raised within a step that is not finished, because a stop was requested."""


class Stopping:
    """Whether a run is to stop, and how.

    Args:
        folder: what the run writes to.
        minutes: that the whole run may take until its training ends; None: no limit but the training loop's own.
    Attributes:
        since: from when on time counts for the next training loop; the preparation before it counts, too.
        requested: a stop was requested.
        training: a training loop has begun, so that the limit is its business.
    """

    def __init__(self, folder: Path | None = None, minutes: float | None = None) -> None:
        self.since = time.monotonic()
        self.requested = False
        self.training = False
        self._folder = folder
        self._minutes = minutes
        self._ends = None if minutes is None else self.since + 60 * minutes
        self._within = False  # a part of a step that may be cut
        self._lock = threading.RLock()  # held while weights change, or are written
        self._rescue: Callable[[], str] | None = None
        self._limit_reached = False
        self._over = False

    def kept(self) -> str:
        """The files that a stopped run leaves, in words."""
        run = None if self._folder is None else self._folder / "run"
        if self._folder is not None and (self._folder / "training.json").exists():
            return f"the trained weights are kept in {self._folder}"
        if run is None or not run.is_dir() or not any(run.iterdir()):
            return "nothing was trained yet, and nothing is kept"
        steps = sorted(run.rglob("step-*"))
        what = f"the checkpoint {steps[-1]}" if steps else f"the preparation, in {run},"
        return f"{what} is kept; give the same command to go on"

    @property
    def message(self) -> str:
        """Why the run stopped before its training loop saved anything, and the kept files."""
        if self._limit_reached:
            return f"--minutes {self._minutes:g} were over before training began: give more; {self.kept()}"
        return f"stopped; {self.kept()}"

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """A stretch in which nothing changes that a checkpoint holds: a stop raises :class:`Cut` in it."""
        if self.requested:
            raise Cut
        self._within = True
        try:
            yield
        finally:
            self._within = False
        if self.requested:
            raise Cut

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A stretch that is finished before the process ends."""
        with self._lock:
            yield

    @contextmanager
    def saving(self, rescue: Callable[[], str]) -> Iterator[None]:
        """A training loop.

        Args:
            rescue: writes a checkpoint and returns a message with its path; another thread calls it if this one does
                not return from native code.
        """
        self.training, self._rescue = True, rescue
        try:
            yield
        finally:
            self._rescue, self.since = None, time.monotonic()

    def ask(self, number: int, frame: Any) -> None:
        """Handle a signal: a second one, and one before a training loop, ends the run at once."""
        again, self.requested = self.requested, True
        if self._within and not again:
            raise Cut
        if self._rescue is None or again:
            raise KeyboardInterrupt

    def watch(self, wake: int) -> None:
        """Wait for a signal, or for the end of the time, and end a process that does not stop by itself.

        Args:
            wake: a pipe to which a byte is written with every signal.
        """
        while True:
            left = None if self._ends is None or self.training else max(0.0, self._ends - time.monotonic())
            ready, _, _ = select.select([wake], [], [], left)
            if ready:
                if self._over:
                    return
                if not set(os.read(wake, 16)) & set(_SIGNALS):
                    continue
            elif self.training:
                continue
            else:
                self._limit_reached = True
                os.kill(os.getpid(), signal.SIGTERM)
            ends = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < ends and not self._over:
                time.sleep(0.05)
            with self._lock:
                if not self._over:
                    self._end()
            return

    def _end(self) -> None:
        try:
            said = self.message if self._rescue is None else self._rescue()
        except ForetokenError as error:
            said = f"stopped; {error}"
        sys.stderr.write(f"error: {said}\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED if not self._limit_reached else 1)


_current: Stopping | None = None


def current() -> Stopping:
    """The current run's; outside of a run, one that handles no signals."""
    return Stopping() if _current is None else _current


@contextmanager
def stoppable(folder: Path | None = None, minutes: float | None = None) -> Iterator[Stopping]:
    """Let Ctrl-C, SIGTERM and the limit stop the code inside. Outside of the main thread nothing is handled.

    Args:
        folder, minutes: as :class:`Stopping` has them.
    Raises:
        Interrupted: it was stopped; the message names the kept files. Without a folder it is a KeyboardInterrupt.
        ForetokenError: the time was over before training began.
    """
    global _current
    stop = Stopping(folder, minutes)
    if _current is not None or threading.current_thread() is not threading.main_thread():  # signals come to no other
        yield stop if _current is None else _current
        return
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    handled = [each for each, handler in before.items() if handler not in (None, signal.SIG_IGN)]
    for each in handled:
        signal.signal(each, stop.ask)
    former = signal.set_wakeup_fd(woken)
    watcher = threading.Thread(target=stop.watch, args=(wake,), name="stopping", daemon=True)
    watcher.start()
    _current = stop
    try:
        yield stop
    except KeyboardInterrupt:
        if folder is None:  # a training loop alone, by a program's call
            raise
        if stop._limit_reached:
            raise ForetokenError(stop.message) from None
        raise Interrupted(stop.message) from None
    finally:
        with stop.whole():
            stop._over = True
        _current = None
        signal.set_wakeup_fd(former)
        for each in handled:
            signal.signal(each, before[each])
        os.write(woken, b"\0")  # wakes the thread
        watcher.join()
        os.close(wake)
        os.close(woken)
