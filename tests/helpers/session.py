"""Shared set-up: a share of the cores, no hub, the same examples every time, and a reason for what cannot run here."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported; tests of the hub unset it
os.environ.setdefault("FORETOKEN_KEPT_GB", "0")  # nothing is left in the user's cache folder, nor read from it
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start would compile the package again and again

import pytest
import torch
from hypothesis import settings

from helpers.pairwise import beyond_covering

sys.dont_write_bytecode = False  # every worker would rewrite the assertions of all tests in every run

gc.disable()  # until the tests are collected: modules and tests stay, so walks over them find nothing


def _num_threads() -> int:
    """Two at most, and no more than there are cores for all workers: threads that wait for each other at every layer
    are many times slower where they take turns. Tests that are about threads say how many."""
    if "MUTANT_UNDER_TEST" in os.environ:  # forks inherit no threads: one that waited for a second would look killed
        return 1
    if "OMP_NUM_THREADS" in os.environ:
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, min(2, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


torch.set_num_threads(_num_threads())

# a background shell starts programs with SIGINT ignored, and so would be every process that a test interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a change must not fail, or pass, by the luck of its draw; --hypothesis-profile=default looks for new examples
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """The collector skips present objects from now on: a third of the collection's time, and some at every test."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # tests make many objects and keep few: most walks find nothing
    gc.enable()


_CACHED = type(functools.cache(len))
_give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # only glibc has it


@pytest.fixture(scope="module", autouse=True)
def _what_a_file_caches_goes_with_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """A recipe keeps caches for eight requests: the recipes of one file took 3 GB, and those of a whole worker 8."""
    yield
    own = [each for each in vars(request.module).values() if isinstance(each, _CACHED)]
    filled = [each for each in own if each.__module__ == request.module.__name__ and each.cache_info().currsize]
    if not filled:  # the rest takes some fifty milliseconds, and there are four hundred files
        return
    for each in filled:
        each.cache_clear()
    gc.collect()
    gc.freeze()  # these objects last to the end: the walk at the next file's end skips them
    if _give_back is not None:
        _give_back(0)


@pytest.fixture(scope="session", autouse=True)
def _costs_of_steps_are_measured_once() -> Iterator[None]:
    """No text depends on them, and `kangaroo` would spend more time on a median of five than on a text."""
    with mock.patch("foretoken.drafting.exit_costs._REPEATS", 1):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all_variants", default=False):
        full = [item for item in items if item.get_closest_marker("full_product")]
        left_out = {*full, *beyond_covering(items)}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
