"""Untrained SPRINTER heads, for the bundled pair and for others."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from foretoken import zoo
from foretoken.methods.sprinter.network import HeadConfig, SprinterHead
from foretoken.models.fingerprint import fingerprint
from helpers.untrained import random_unit

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
    """A head of a pair that need not be loaded, default the bundled one: a constant if ``spread`` is 0."""
    config = HeadConfig(
        feature=feature,
        width=width,
        target="zoo:base",
        target_fingerprint=fingerprint(target or zoo.path("base")),
        draft="zoo:draft",
        draft_fingerprint=fingerprint(draft or zoo.path("draft")),
    )
    return SprinterHead(config, random_unit(config.num_inputs, bias=bias, spread=spread, seed=3))


@cache
def shelved_head(feature: str = "pre", bias: float = 0.0, spread: float = 0.1) -> str:
    """The folder of such a head of the bundled pair; it is removed when Python ends."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-head-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    head(feature, bias=bias, spread=spread).save(folder)
    return str(folder)
