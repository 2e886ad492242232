"""Bounds of what an ``LLM`` is made with: absurd numbers are refused before anything is loaded or reserved."""

from __future__ import annotations

import os
from typing import Any

from foretoken.core.errors import ConfigError
from foretoken.core.plain import plain

_MOST_SEQS = 4096  # requests at once: each has a place in the cache from the beginning
_MOST_ROWS = 2**20  # of one forward
_LEAST_THREADS = 8  # that may be asked for on the smallest machine


def check_engine(max_num_seqs: Any, max_rows_per_step: Any, seed: Any, prefix_cache_bytes: Any) -> None:
    """Refuse limits of an engine that are none.

    Raises:
        ConfigError: names option, value and bounds.
    """
    _check("max_num_seqs", max_num_seqs, 1, _MOST_SEQS)
    _check("max_rows_per_step", max_rows_per_step, 1, _MOST_ROWS)
    _check("prefix_cache_bytes", prefix_cache_bytes, 1, 2**63 - 1)
    if seed is not None:
        _check("seed", seed, 0, 2**63 - 1)


def check_queue(max_queue: Any) -> None:
    """Refuse a length of a queue that is none.

    Raises:
        ConfigError: names the bounds.
    """
    _check("max_queue", max_queue, 0, 2**31 - 1)


def check_flags(**flags: Any) -> None:
    """Refuse switches that are neither on nor off.

    Raises:
        ConfigError: names the first of them.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r:.60} must be True or False")


def threads(count: Any) -> int:
    """A number of threads that this machine can be asked for.

    Raises:
        ConfigError: it is none, or far more than there are processors.
    """
    processors = os.cpu_count() or 1
    _check("threads", count, 1, max(_LEAST_THREADS, 4 * processors), f" (there are {processors} processors)")
    return int(plain(count))


def _check(name: str, value: Any, low: int, high: int, note: str = "") -> None:
    number = plain(value)
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
        raise ConfigError(f"{name}={value!r:.60} must be an integer, at least {low} and at most {high}{note}")
