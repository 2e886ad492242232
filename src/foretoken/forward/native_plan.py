"""The description of a plan that a native decoder needs to compute it in one call.

A plan that can be described like this is computed by ``native/``, where that fits the model; every other plan is
called layer by layer through ``attend``. Both ways give the same result up to rounding. Sparse parts are
described one by one; a part without a description is dense.

Letters: S slots, G key/value heads, N blocks, D key width, W numbers that sum up a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretoken.forward.cache import KVCache


@dataclass(frozen=True, slots=True)
class Blocks:
    """Attention over selected blocks of the committed prefix; methods/sparse/blocks.py defines the selection.

    The query that selects exists in the forward only, so that selecting is the decoder's part.

    Attributes:
        size: columns of a block, a multiple of 16.
        sinks, locals: first and last blocks that are always kept.
        sets: "per_head", "global" (among the blocks of all key/value heads together) or "per_layer" (the same blocks
            for all of them).
        keep: for each segment, blocks to keep in a layer, over all heads; 0: dense attention.
        score: the score that orders blocks: "exact", "bounds" or "mean".
        voters: the rows of a segment that score, their sum counting: "root", the first one, or "all".
        selects: whether a layer selects; if not, it uses the previous layer's selection. The first layer of a forward
            that can select always does.
        summaries: for "bounds" (W = 2 D) and "mean" (W = D): summaries of a layer's whole committed blocks, float32
            [S, G, N, W]; valid for the segments with sparse attention. Called for the layers that select, before they
            run. None for "exact".
    """

    size: int
    sinks: int
    locals: int
    sets: str
    keep: Sequence[int]
    score: str
    voters: str
    selects: Callable[[int], bool]
    summaries: Callable[[int], Tensor] | None


class Clock(Protocol):
    """Sums the wall time of attention, new keys and values included, over forwards."""

    attention_seconds: float


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One forward's plan, described.

    Attributes:
        cache: where keys and values are written and read.
        blocks: None: attention over all columns.
        thresholds: for each row, the least value of an MLP's activated gate (methods/sparse/feed_forward.py); smaller
            ones are skipped. None: dense MLPs.
        clock: accumulates the time of attention; None: not measured.
    """

    cache: KVCache
    blocks: Blocks | None = None
    thresholds: Sequence[float] | None = None
    clock: Clock | None = None
