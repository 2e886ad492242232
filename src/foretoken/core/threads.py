"""Small work of torch on one thread: others would take longer to wake than to help.

Where a forward runs on threads of its own (native/team.py), torch's threads do harm besides: they go on spinning
for a while after every operation that they have shared, on the cores that the next forward needs.
"""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_SMALL = 1 << 18  # numbers of a tensor: an operation over so many takes one thread a tenth of a millisecond


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota: more threads wait for each other."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(given, math.ceil(_quota() or given)))


def _quota() -> float | None:
    """Cores that a container may use; None if there is no limit."""
    try:
        most, period = _QUOTA.read_text(encoding="ascii").split()
        return int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(count: int) -> AbstractContextManager[None]:
    """As many threads as work over ``count`` numbers is worth: one, or what torch uses."""
    return one_thread() if count <= _SMALL else nullcontext()
