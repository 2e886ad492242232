"""How the target may compute its verifications less than fully: the ``verification.*`` settings of a recipe.

    attention   each row reads some blocks of the prefix       methods/sparse/attention.py
    ffn         channels of an MLP are left out                methods/sparse/feed_forward.py
    moe         experts of a row are left out                  methods/sparse/feed_forward.py

Paper: arXiv:2512.21911. The three are independent and may be combined. All of them are off by default; then, and for
prompts always, the target computes everything, bit for bit as without these settings.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.methods.sparse.blocks import SCORES, SETS, VOTERS
from foretoken.options.option import Checked, Option

KEY = "verification"
_SMALLEST_BLOCK = 16
# a setting that says nothing while the parts that it belongs to are all off
_PARTS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("budget", "dense_below", "block", "sinks", "locals"), ("attention",)),
    **dict.fromkeys(("score", "voters", "gate", "reuse"), ("attention",)),
    "theta": ("reuse",),
    "moe_rule": ("moe",),
    **dict.fromkeys(("refresh", "confirm"), ("attention", "ffn", "moe")),
}
_EXAMPLES = {"attention": "per_head", "reuse": "calibrated", "ffn": "0.05", "moe": "1"}


@dataclass(frozen=True, kw_only=True)
class VerificationConfig(Checked):
    """What of a verification may be left out."""

    name_prefix = f"{KEY}."

    attention: Annotated[
        str,
        Option(
            "off: dense; per_head: every key/value head picks its own blocks; global: the heads of a layer share one "
            "budget; per_layer: all heads of a layer read the same blocks.",
            choices=("off", *SETS),
        ),
    ] = "off"
    budget: Annotated[
        float,
        Option(
            "rho, the share of the prefix beyond dense_below that may be read.",
            above=0,
            most=1,
            remedy="0.1 reads a tenth, 1 everything",
        ),
    ] = 0.1
    dense_below: Annotated[int, Option("L0, rows of prefix up to which attention is dense.", least=0)] = 4096
    block: Annotated[
        int, Option("Rows that are picked together; a power of two.", least=_SMALLEST_BLOCK, remedy="64 is usual")
    ] = 64
    sinks: Annotated[int, Option("First blocks, always read.", least=0)] = 1
    locals: Annotated[int, Option("Last whole blocks, always read.", least=0)] = 2
    score: Annotated[
        str,
        Option(
            "How a row orders blocks: exact, by its attention weights; bounds or mean of their keys, which are "
            "cheaper and find less.",
            choices=SCORES,
        ),
    ] = "exact"
    voters: Annotated[
        str,
        Option(
            "The rows that order blocks: root, or all rows of the draft together, which serves the draft better and "
            "costs a product with every key for each of them (exact).",
            choices=VOTERS,
        ),
    ] = "root"
    gate: Annotated[
        bool, Option("Attention stays dense where choosing blocks costs more than it saves, as for single rows.")
    ] = True
    reuse: Annotated[
        str,
        Option(
            "calibrated: only the calibration's anchor layers pick, the layers after each take over its choice.",
            choices=("off", "calibrated"),
        ),
    ] = "off"
    theta: Annotated[
        float | None,
        Option(
            "Similarity of choices below which a layer is an anchor: 0 leaves the first two; None: the calibration's.",
            least=0,
            most=1,
            remedy="0 leaves two anchors, 1 makes all layers",
        ),
    ] = None
    refresh: Annotated[
        int, Option("Every so many tokens their keys and values are computed again, densely; 0: never.", least=0)
    ] = 0
    confirm: Annotated[
        int,
        Option(
            "So many tokens are decided sparsely and then confirmed by a dense verification; 0: never confirmed.",
            least=0,
        ),
    ] = 0
    ffn: Annotated[
        float,
        Option(
            "tau: channels of an MLP with an activated gate below it are left out; 0: none.",
            least=0,
            remedy="give a threshold, for example 0.05; 0 is off",
        ),
    ] = 0.0
    moe: Annotated[
        int, Option("m: experts of a row that may be left out, fewer than the model chooses for it; 0: none.", least=0)
    ] = 0
    moe_rule: Annotated[
        str,
        Option(
            "How many experts are left out, see methods/sparse/feed_forward.py.",
            choices=("nested", "largest", "all_or_none"),
        ),
    ] = "nested"
    calibration: Annotated[
        str | Path | None, Option("File of `foretoken calibrate sparse`; None: the file next to the target's weights.")
    ] = None

    def check_together(self) -> None:
        if self.block & (self.block - 1):
            raise ConfigError(f"{KEY}.block={self.block} must be a power of two, for example 64")
        if self.refresh and self.confirm:
            raise ConfigError(
                f"{KEY}.refresh={self.refresh} does nothing with {KEY}.confirm: rows are dense when they stay"
            )

    @property
    def sparse(self) -> bool:
        """Whether any token is decided with parts omitted, so that the output has no guarantee."""
        return self.confirm == 0 and (self.attention != "off" or self.ffn > 0.0 or self.moe > 0)

    @property
    def in_words(self) -> str:
        """The active settings, as typed on a command line."""
        on = {"attention": self.attention != "off", "ffn": self.ffn > 0.0, "moe": self.moe > 0}
        return ", ".join(f"{KEY}.{name}={getattr(self, name)}" for name, wanted in on.items() if wanted)


def configured(given: Mapping[str, Any]) -> VerificationConfig:
    """The settings, under their names without ``verification.``, checked.

    Raises:
        ConfigError: an unknown setting (the nearest name is offered), one out of range, or one that belongs to a part
            that is not switched on.
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
