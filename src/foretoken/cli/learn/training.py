"""What the commands of ``foretoken train`` share at the terminal: the device's check, stopping, and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.cli.shared.console import display, note
from foretoken.core.errors import ConfigError
from foretoken.core.phases import PHASES
from foretoken.options.model import ModelOptions
from foretoken.options.option import named

if TYPE_CHECKING:
    from foretoken.train.trainer import Progress, Report


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
    """Show how far a training loop is, and the preparation before its first step.

    See :func:`foretoken.cli.shared.console.display`, and core/phases.py; a warning is a line that stays.
    """
    with display(title) as show:
        show("reading the data")
        before = _Before(show, title)
        PHASES.addHandler(before)

        def report(progress: Progress) -> None:
            PHASES.removeHandler(before)
            show(_state(progress), progress.done)

        try:
            yield report
        finally:
            PHASES.removeHandler(before)


class _Before(logging.Handler):
    """Shows the newest phase of a preparation."""

    def __init__(self, show: Callable[[str], None], title: str) -> None:
        super().__init__()
        self._show, self._title = show, title

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            note(f"{self._title}: {record.getMessage()}")
        else:
            self._show(record.getMessage())


@contextmanager
def counting(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show something that is counted up to about ``total``."""
    with display(title) as show:
        show(f"0 of {total:,}", 0.0)
        yield lambda number: show(f"{number:,} of {total:,}", min(1.0, number / max(1, total)))


def _state(progress: Progress) -> str:
    rate = progress.tokens / max(progress.seconds, 1e-9)
    measured = f", {progress.measured}" if progress.measured else ""
    return (
        f"{progress.done:.0%}, step {progress.step:,}, loss {progress.loss:.3f}, {progress.tokens / 1e6:.2f} M tokens, "
        f"{rate:,.0f} tokens/s{measured}"
    )
