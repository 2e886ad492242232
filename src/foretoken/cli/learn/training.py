"""What the commands of ``foretoken train`` share at the terminal: the device's check, stopping, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.cli.shared.console import note, stderr_console
from foretoken.core.errors import ConfigError
from foretoken.options.model import ModelOptions
from foretoken.options.option import named

if TYPE_CHECKING:
    from foretoken.train.trainer import Progress, Report

SECONDS_BETWEEN_LINES = 30.0  # of progress where stderr is no terminal


def found_device(device: str) -> str:
    """The device to train on; "auto" is cuda where there is one. Refuses what torch does not see."""
    try:
        named(ModelOptions, "device").check(device)
    except ConfigError as error:
        raise ConfigError(f"--device {device}: not available here; {error}") from None
    if device == "cpu":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda" if device == "auto" else device
    if device != "auto":
        raise ConfigError(f"--device {device}: not available here; use cpu")
    return "cpu"


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """A bar on a terminal, else a line now and then."""
    console = stderr_console()
    if not console.is_terminal:
        yield _lines(title)
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(title, total=1.0, state="reading the data")
        yield lambda progress: bar.update(task, completed=progress.done, state=_state(progress))


@contextmanager
def counting(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same for something that is counted up to about ``total``."""
    console = stderr_console()
    if not console.is_terminal:
        last = time.monotonic() - SECONDS_BETWEEN_LINES

        def line(number: int) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                note(f"{title}: {number:,} of {total:,}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.update(task, completed=min(number, total))


def _lines(title: str) -> Report:
    last = time.monotonic() - SECONDS_BETWEEN_LINES

    def report(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            note(f"{title}: {progress.done:.0%}, step {progress.step}, {_state(progress)}")

    return report


def _state(progress: Progress) -> str:
    rate = progress.tokens / max(progress.seconds, 1e-9)
    measured = f", {progress.measured}" if progress.measured else ""
    return f"loss {progress.loss:.3f}, {progress.tokens / 1e6:.2f} M tokens, {rate:,.0f} tokens/s{measured}"
