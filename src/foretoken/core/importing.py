"""Importing large libraries, and loading what they compute, in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Let Python's garbage collector rest meanwhile; it goes on afterwards if it was on.

    Modules leave hundreds of thousands of objects and hardly any garbage, and the collector walks over all of them
    again and again: a sixth of the processor time of importing torch and transformers. They are counted as old
    afterwards, or the next collection of what is young would walk over them once more.
    """
    resting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if resting:
            if not gc.get_freeze_count():  # what somebody froze stays frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
