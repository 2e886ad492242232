"""Importing large libraries, and loading models, in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from foretoken.core.stand_ins import stand_ins

_MANY = 20_000  # young objects; a walk over fewer is over in a millisecond


@contextmanager
def lean_imports() -> Iterator[None]:
    """Let Python's garbage collector rest meanwhile; a command imports no module that only other tasks use, either.

    See stand_ins.py for the second. The collector goes on afterwards if it was on.

    Modules leave hundreds of thousands of objects and hardly any garbage, and the collector walks over all of them
    again and again: a sixth of the processor time of importing torch and transformers. They are counted as old
    afterwards, or the next collection of young objects would walk over them once more.
    """
    resting = gc.isenabled()
    gc.disable()
    try:
        with stand_ins():
            yield
    finally:
        if resting:
            # objects that other code froze stay frozen; counting it is a walk of its own, so only where much was made
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
