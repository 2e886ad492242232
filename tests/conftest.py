"""Shared set-up: a share of the cores, no hub, the same examples every time, and a reason for what cannot run here."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported; tests of the hub unset it
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings


def _num_threads() -> int:
    """Two at most, and no more than there are cores for all workers: threads that wait for each other at every layer
    are many times slower where they take turns. Tests that are about threads say how many."""
    if "MUTANT_UNDER_TEST" in os.environ:  # forks inherit no threads: one that waited for a second would look killed
        return 1
    if "OMP_NUM_THREADS" in os.environ:
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, min(2, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


torch.set_num_threads(_num_threads())

# a change must not fail, or pass, by the luck of its draw; --hypothesis-profile=default looks for new examples
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
