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
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.core.phases import PHASES

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_SECONDS = 2.0  # without a word
SECONDS_BETWEEN_LINES = 30.0  # of progress where stderr is no terminal
CLEAR_LINE = "\r\x1b[K"


class OutputClosed(ForetokenError):
    """The reader of stdout went away (``| head``): nothing is wrong, and nobody is left to tell."""

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
    """A line on stderr while something lasts longer than two seconds; on a terminal nothing is left of it.

    What is under way is told by the logger :data:`foretoken.core.phases.PHASES`, and stands in the place of ``text``.
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
    """Shows the newest phase, once it has been told to begin."""

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


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[..., None]]:
    """How far something is: a bar on a terminal, else a line on stderr now and then.

    Gives what to call after every piece of work; it may be told what is under way, which then stands after the name.
    """
    if not sys.stderr.isatty():
        yield _lines(name, total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # drawn when called only: a thread that redraws would take processor time from what is measured
    with Progress(*columns, console=stderr_console(), transient=True, auto_refresh=False) as progress:
        bar = progress.add_task(f"{name}warm-up" if name.endswith(" ") or not name else name, total=total)
        yield lambda what="": progress.update(bar, advance=1, description=name + what, refresh=True)


def time_left(seconds: float) -> str:
    """Seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _lines(name: str, total: int) -> Callable[..., None]:
    done, began = 0, time.monotonic()
    last = began

    def line(what: str = "") -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            left = (last - began) / done * max(0, total - done)
            note(f"{name + what}: {done:,} of {total:,}, about {time_left(left)} left")

    return line


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """One line on stderr that says what is under way, if that is a terminal; gives what to call with the words."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    # drawn when called only, as above
    with Progress(*columns, console=stderr_console(), transient=True, auto_refresh=False) as progress:
        line = progress.add_task("", total=None)
        yield lambda what: progress.update(line, description=what, refresh=True)


def prepare_output() -> None:
    """Make stdout and stderr accept any text, whatever the terminal's encoding, and closed streams be empty ones.

    A closed stdout stays closed: what cannot be said there is an error (:func:`emit`).
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
