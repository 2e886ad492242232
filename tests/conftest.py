"""Shared set-up: two threads, no hub, the same examples every time, and a reason for what cannot run here."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported; tests of the hub unset it
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings

# mutants are tried in forks, which inherit no threads: one that waited for a second would look killed
torch.set_num_threads(1 if "MUTANT_UNDER_TEST" in os.environ else 2)

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
