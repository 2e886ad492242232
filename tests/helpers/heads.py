"""SPRINTER heads that nobody trained, for the bundled pair and for others."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from foretoken import zoo
from foretoken.drafting.logistic import Logistic
from foretoken.methods.sprinter.head import HeadConfig, SprinterHead
from foretoken.models.fingerprint import fingerprint

WIDTH = 192  # of zoo:draft


def head(
    feature: str = "pre",
    *,
    bias: float = 0.0,
    spread: float = 0.0,
    target: Path | None = None,
    draft: Path | None = None,
    width: int = WIDTH,
) -> SprinterHead:
    """A head of a pair, default the bundled one: a constant, with random weights if ``spread`` is above 0."""
    places = target or zoo.path("base"), draft or zoo.path("draft")
    config = HeadConfig(feature, width, "zoo:base", fingerprint(places[0]), "zoo:draft", fingerprint(places[1]))
    weight_D = spread * torch.randn(width, generator=torch.Generator().manual_seed(3))
    return SprinterHead(config, Logistic(weight_D, bias))


@cache
def shelved_head(feature: str = "pre", bias: float = 0.0, spread: float = 0.1) -> str:
    """The folder of such a head of the bundled pair; it is removed when Python ends."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-head-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    head(feature, bias=bias, spread=spread).save(folder)
    return str(folder)
