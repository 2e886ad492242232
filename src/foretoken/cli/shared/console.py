"""Where output goes: results to stdout, everything else to stderr, and nothing that the libraries say on their own."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.core.errors import ForetokenError
from foretoken.core.phases import PHASES

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_SECONDS = 1.0  # without a word
SECONDS_BETWEEN_LINES = 30.0  # of a display where stderr is no terminal
FIRST_SECONDS = 4.0  # until its first line
CLEAR_LINE = "\r\x1b[K"


class OutputClosed(ForetokenError):
    """The reader of stdout went away (``| head``): nothing is wrong, and no message is possible."""

    exit_code = 0


def emit(text: str, *, end: str = "\n") -> None:
    """Write to stdout and flush, so that a reader sees every step as it happens."""
    if sys.stdout is None:  # the shell closed it before the command began: >&-
        raise ForetokenError("cannot write to stdout: it is closed")
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise ForetokenError(f"cannot write to stdout: {error.strerror or error}") from None


def emit_json(value: Any) -> None:
    """One JSON object on one line of stdout. Numbers that JSON lacks (nan, inf) become null."""
    ascii_only = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"
    emit(json.dumps(finite(value), ensure_ascii=ascii_only, allow_nan=False))


def note(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def passing_note(text: str) -> Iterator[None]:
    """A line on stderr while something lasts longer than a second; on a terminal it is erased afterwards.

    The logger :data:`foretoken.core.phases.PHASES` names the current phase, which replaces ``text``.
    """
    passing = _Passing(text)
    PHASES.addHandler(passing)
    timer = threading.Timer(PATIENCE_SECONDS, passing.begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        PHASES.removeHandler(passing)
        passing.end()


class _Passing(logging.Handler):
    """Shows the newest phase, after ``begin``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._shown = self._over = False

    def emit(self, record: logging.LogRecord) -> None:
        before, self._text = self._text, record.getMessage()
        if self._shown and self._text != before:
            self._show()

    def begin(self) -> None:
        with self.lock or contextlib.nullcontext():
            if not self._over:
                self._show()

    def end(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._over = True
            if self._shown and sys.stderr.isatty():
                print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def _show(self) -> None:
        self._shown = True
        if sys.stderr.isatty():
            print(f"{CLEAR_LINE}{self._text}", end="", file=sys.stderr, flush=True)
        else:
            note(self._text)


def finite(value: Any) -> Any:
    """The same value with None for every float that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def emit_laid_out(*parts: Any, width: int = 120) -> None:
    """Print what rich lays out, such as tables.

    Args:
        width: columns in a file or a pipe; a terminal has its own.
    """
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=width)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    emit(capture.get(), end="")


def stderr_console() -> Console:
    """A rich console on stderr, for progress bars."""
    from rich.console import Console

    return Console(stderr=True)


class Show(Protocol):
    """Updates a display."""

    def __call__(self, state: str, share: float | None = None, title: str | None = None) -> None:
        """Show a state, such as "3 of 10".

        Args:
            share: done, from 0 to 1; None: not known, and no time left is shown.
            title: of the task from now on; None: unchanged.
        """


@contextmanager
def display(title: str, *, live: bool = True) -> Iterator[Show]:
    """Show how far a task is: a bar on a terminal, else a line on stderr every 30 seconds.

    Args:
        live: keep the elapsed time and the lines coming while the task reports nothing. A measurement passes False,
            because the thread that does it would take processor time from the measured code.
    """
    if not sys.stderr.isatty():
        with _Lines(title, live) as lines:
            yield lines.show
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=stderr_console(), transient=not live, auto_refresh=live
    ) as progress:
        bar = progress.add_task(title, total=None, state="")

        def show(state: str, share: float | None = None, title: str | None = None) -> None:
            total = None if share is None else 1.0
            progress.update(bar, completed=share, total=total, description=title, state=state, refresh=not live)

        yield show


class _Lines:
    """Writes the newest state as a line on stderr, every 30 seconds.

    Args:
        live: write also while nothing is reported, in a thread.
        clock: seconds that only grow.
    """

    def __init__(self, title: str, live: bool, clock: Callable[[], float] | None = None) -> None:
        self._title, self._clock = title, clock or time.monotonic
        self._state = ""
        self._share: float | None = None
        self._first: tuple[float, float] | None = None  # time and share from which the time left is estimated
        self._last = self._clock() - max(0.0, SECONDS_BETWEEN_LINES - FIRST_SECONDS) * live
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="progress", daemon=True) if live else None

    def __enter__(self) -> _Lines:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def show(self, state: str, share: float | None = None, title: str | None = None) -> None:
        with self._lock:
            if share is not None and (self._first is None or share < (self._share or 0.0)):
                self._first = (self._clock(), share)  # the task, or its next stage, begins
            self._state, self._share, self._title = state, share, title or self._title
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write a line if the last one is 30 seconds old."""
        with self._lock:
            if self._clock() - self._last >= SECONDS_BETWEEN_LINES:
                self._last = self._clock()
                note(f"{self._title}: {self._state}{self._left()}" if self._state else self._title)

    def _left(self) -> str:
        if self._share is None or self._first is None or self._share <= self._first[1]:
            return ""
        began, share = self._first
        left = (self._last - began) / (self._share - share) * max(0.0, 1.0 - self._share)
        return f", about {time_left(left)} left"

    def _keep_writing(self) -> None:
        while not self._over.wait(max(0.1, self._last + SECONDS_BETWEEN_LINES - self._clock())):
            self.write_if_due()


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[..., None]]:
    """Show how many pieces of work are done, without a thread (see :func:`display`).

    Gives what to call after every piece of work; the name of the piece, if given, is shown after ``name``.
    """
    done = 0
    with display(f"{name}warm-up" if name.endswith(" ") or not name else name, live=False) as show:

        def advance(what: str = "") -> None:
            nonlocal done
            done += 1
            show(f"{done:,} of {total:,}", done / max(1, total), name + what)

        show(f"0 of {total:,}", 0.0)
        yield advance


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Show the current phase, without a thread; returns the function that sets its text."""
    with display("", live=False) as show:
        yield lambda what: show("", None, what)


def time_left(seconds: float) -> str:
    """Seconds in words, rounded."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def prepare_output() -> None:
    """Make stdout and stderr accept any text, whatever the terminal's encoding, and closed streams be empty ones.

    A closed stdout stays closed: output to it is an error (:func:`emit`).
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:  # print would take stdout in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def silence_libraries(verbose: bool) -> None:
    """Keep loading bars and warnings of torch and transformers off the terminal; call it before they are imported."""
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def quiet_transformers(verbose: bool) -> None:
    """The part of the silence that needs transformers itself; call it before a model is loaded."""
    if verbose:
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
