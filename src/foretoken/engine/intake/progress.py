"""A progress bar of answered prompts, for calls with ``use_tqdm``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.engine.output import RequestOutput

Progress = Callable[["RequestOutput"], None]


@contextmanager
def shown(wanted: bool | Callable[..., Any], total: int, progress: Progress | None) -> Iterator[Progress | None]:
    """What to call with each output: the caller's own function, and a bar's step.

    Args:
        wanted: True: tqdm's bar on standard error; a class like it draws in its way; False: none.
        total: outputs that will come.
        progress: the caller's own function; None: there is none.
    Raises:
        ConfigError: the value of ``use_tqdm`` is not a progress bar.
    """
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress={progress!r:.60} must be a function that takes an output")
    if wanted is False or wanted is None:
        yield progress
        return
    if wanted is not True and not callable(wanted):
        raise ConfigError(f"use_tqdm={wanted!r:.60} must be True, False, or a class like tqdm.tqdm")
    draw = importlib.import_module("tqdm").tqdm if wanted is True else wanted  # it comes with transformers
    bar = draw(total=total, desc="prompts", dynamic_ncols=True)

    def told(output: RequestOutput) -> None:
        bar.update(1)
        if progress is not None:
            progress(output)

    try:
        yield told
    finally:
        bar.close()
