"""How the target may compute its verifications less than fully: the ``verification.*`` settings of a recipe.

    attention   each row reads some blocks of the prefix       methods/sparse/attention.py
    ffn         channels of an MLP are left out                methods/sparse/feed_forward.py
    moe         experts of a row are left out                  methods/sparse/feed_forward.py

Paper: arXiv:2512.21911. The three are independent and may be combined. All of them are off by default; then, and for
prompts always, the target computes everything, bit for bit as without these settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.methods.sparse.blocks import SCORES, SETS

KEY = "verification"
_CHOICES = {
    "attention": ("off", *SETS),
    "score": SCORES,
    "reuse": ("off", "calibrated"),
    "moe_rule": ("nested", "largest", "all_or_none"),
}
_SMALLEST_BLOCK = 16
# a setting that says nothing while the parts that it belongs to are all off
_PARTS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("budget", "dense_below", "block", "sinks", "locals", "score", "reuse"), ("attention",)),
    "theta": ("reuse",),
    "moe_rule": ("moe",),
    **dict.fromkeys(("refresh", "confirm"), ("attention", "ffn", "moe")),
}
_EXAMPLES = {"attention": "per_head", "reuse": "calibrated", "ffn": "0.05", "moe": "1"}


@dataclass(frozen=True, kw_only=True)
class VerificationConfig:
    """What of a verification may be left out.

    Attributes:
        attention: "off": dense; "per_head": every key/value head picks its own blocks; "global": the heads of a layer
            share one budget; "per_layer": all heads of a layer read the same blocks.
        budget: rho, share of the prefix beyond ``dense_below`` that may be read, in (0, 1]; 1: all of it.
        dense_below: L0, rows of prefix up to which attention is dense.
        block: rows that are picked together; a power of two, 16 or more.
        sinks: first blocks, always read.
        locals: last whole blocks, always read.
        score: by what the root row orders blocks: "exact", its attention weights; "bounds" or "mean" of their keys,
            which are cheaper and find less; see methods/sparse/blocks.py.
        reuse: "calibrated": only the calibration's anchor layers pick, the layers behind each take over its choice.
        theta: similarity of choices below which a layer is an anchor, in [0, 1]: 0 leaves the first two; None: the
            calibration's.
        refresh: every so many tokens their keys and values are computed again, densely; 0: never.
        confirm: so many tokens are decided sparsely and then confirmed by a dense verification; 0: never confirmed.
        ffn: tau: channels of an MLP whose activated gate is below it are left out; 0: none.
        moe: m: experts of a row that may be left out, fewer than the model chooses for it; 0: none.
        moe_rule: how many of them: "nested", "largest" or "all_or_none", see methods/sparse/feed_forward.py.
        calibration: file of ``foretoken calibrate sparse``; None: what lies beside the target's weights.
    """

    attention: str = "off"
    budget: float = 0.1
    dense_below: int = 4096
    block: int = 64
    sinks: int = 1
    locals: int = 2
    score: str = "exact"
    reuse: str = "off"
    theta: float | None = None
    refresh: int = 0
    confirm: int = 0
    ffn: float = 0.0
    moe: int = 0
    moe_rule: str = "nested"
    calibration: str | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                hint = nearest(value, known) if isinstance(value, str) else f"use one of {', '.join(known)}"
                raise _wrong(name, value, f"is unknown: {hint}")
        if not _is_number(self.budget) or not 0.0 < self.budget <= 1.0:
            raise _wrong("budget", self.budget, "must be a share in (0, 1]: 0.1 reads a tenth, 1 everything")
        if not _is_number(self.ffn) or not 0.0 <= self.ffn < math.inf:
            raise _wrong("ffn", self.ffn, "must be a threshold from 0, for example 0.05; 0 is off")
        if self.theta is not None and (not _is_number(self.theta) or not 0.0 <= self.theta <= 1.0):
            raise _wrong(
                "theta", self.theta, "must be a similarity in [0, 1]: 0 leaves two anchors, 1 makes all layers"
            )
        for name in ("dense_below", "sinks", "locals", "refresh", "confirm", "moe"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise _wrong(name, value, "must be an integer from 0")
        block = self.block
        if not isinstance(block, int) or isinstance(block, bool) or block < _SMALLEST_BLOCK or block & (block - 1):
            raise _wrong("block", block, f"must be a power of two from {_SMALLEST_BLOCK}, for example 64")
        if self.refresh and self.confirm:
            raise _wrong("refresh", self.refresh, f"does nothing with {KEY}.confirm: rows are dense when they stay")
        if self.calibration is not None and not isinstance(self.calibration, str | Path):
            raise _wrong("calibration", self.calibration, "must name a file of 'foretoken calibrate sparse'")

    @property
    def sparse(self) -> bool:
        """Whether what is emitted was decided with something left out, so that nothing is promised about it."""
        return self.confirm == 0 and (self.attention != "off" or self.ffn > 0.0 or self.moe > 0)

    @property
    def in_words(self) -> str:
        """What is on, as one would type it."""
        on = {"attention": self.attention != "off", "ffn": self.ffn > 0.0, "moe": self.moe > 0}
        return ", ".join(f"{KEY}.{name}={getattr(self, name)}" for name, wanted in on.items() if wanted)


def configured(given: Mapping[str, Any]) -> VerificationConfig:
    """The settings, under their names without ``verification.``, checked.

    Raises:
        ConfigError: an unknown setting (the nearest name is offered), one out of range, or one that belongs to a part
            that nobody has switched on.
    """
    known = [field.name for field in dataclasses.fields(VerificationConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown setting '{KEY}.{name}': {nearest(str(name), known)}")
    config = VerificationConfig(**given)
    for name, parts in _PARTS_OF.items():
        if name in given and not any(part in given for part in parts):
            part = parts[0]
            raise ConfigError(
                f"'{KEY}.{name}' does nothing while {KEY}.{part} is off: add {KEY}.{part}={_EXAMPLES[part]}"
            )
    return config


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(name: str, value: Any, what: str) -> ConfigError:
    return ConfigError(f"{KEY}.{name}={value!r} {what}")
