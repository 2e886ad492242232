"""Untrained judges: constants, and functions of the state."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from foretoken import zoo
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.models.fingerprint import fingerprint
from helpers.untrained import random_unit

WIDTH = 384  # of zoo:base


class Planted:
    """In a head's place: any function of the states, row by row."""

    def __init__(self, says: Callable[[Tensor], float], *, threshold: float = 0.5, normed: bool = True) -> None:
        self.config = SimpleNamespace(threshold=threshold, normed=normed)
        self._says = says

    def judge(self, hidden_MD: Tensor) -> Tensor:
        return torch.tensor([self._says(row_D) for row_D in hidden_MD])


def head(
    *, bias: float = 0.0, spread: float = 0.0, threshold: float = 0.5, target: Path | None = None, width: int = WIDTH
) -> JudgeHead:
    """A head of a target that need not be loaded, default the bundled one: a constant if ``spread`` is 0."""
    config = JudgeConfig(
        width=width, threshold=threshold, target="zoo:base", target_fingerprint=fingerprint(target or zoo.path("base"))
    )
    return JudgeHead(config, random_unit(width, bias=bias, spread=spread, seed=5))


@cache
def shelved_judge(bias: float = 0.0, spread: float = 0.3) -> str:
    """The folder of such a head of the bundled target; it is removed when Python ends."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-judge-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    head(bias=bias, spread=spread).save(folder)
    return str(folder)
