"""Selection of the committed prefix's blocks for a verification.

    prefix  |sink|    |    |    |    |local|local|rest|  root n0 n1 …      one block: ``size`` columns of one head
             kept   ×   kept  ×    ×   kept  kept  seen   seen, by the tree

Blocks are whole and committed. The rows after the last whole block (less than one block) and the rows in flight are
always visible, and never selected: no row in flight can be part of a block.

The score of a block for a row with the queries q0 (``score``); the root row's, or the sum over all rows (``voters``):

    exact   the attention weight that the root gives to the block: the sum of its softmax over the block's columns
    bounds  an upper bound of q0 . k over the block, from the smallest and the largest value of each key coordinate
    mean    the mean over the block of q0 . k

Paper:   sparse verification, arXiv:2512.21911, "sparse attention": score(h, b) = mean over the block of q0 . k, q0 the
         root row's query; N = floor(((L - L0) rho + L0) H / B) blocks of a layer for a prefix of L > L0 rows, else all.
         The bounds are those of Quest, arXiv:2406.10774, section 3.3: sum over d of max(q_d min_d, q_d max_d).
Differs: the default is ours: with ``exact`` the blocks are the best there are for the root, at the price of one row of
         query times key in each selecting layer; on the zoo the paper's score finds little more than half of the same
         attention weight (docs/methods/sparse_verification.md). The paper does not give the number of sink and local
         blocks, nor the query of a group of heads. Ours: ``sinks`` and ``locals``, which count towards N and are kept
         also where N is smaller; of a group the weights of its heads are added (exact), or their queries (bounds, mean:
         for the mean that orders blocks as the mean of the heads' scores does). One set for all heads of a layer
         ("per_layer") is ours: heads of two layers have nothing to do with each other, so that only such a set can be
         handed on.
         Keys and queries are those after rotary. Quest scores for every query; here the root's choice serves all rows.

Mean and bounds of a block are known before the query is: so selecting costs one product per block instead of one per
row. A committed row never changes, so a block is summarised once, when it is whole and committed. The cache notifies
its followers when it drops rows (a rollback, a released slot).

Letters: H query heads, G key/value heads (the paper's H), S slots, N whole blocks, B rows of a block, D key width,
W numbers that sum up a block: D (mean) or 2 D (smallest, then largest), n query heads of a group, L columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.forward.cache import KVCache

SCORES = ("exact", "bounds", "mean")
SETS = ("per_head", "global", "per_layer")
VOTERS = ("root", "all")
_SCORING = 0.6  # cost of a row's exact scores, as a share of the row's dense attention; measured


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRule:
    """How many blocks are kept, and which.

    Args:
        budget: share of the prefix beyond ``dense_below`` that is kept (rho), in (0, 1].
        dense_below: prefixes of at most so many rows are attended whole (L0).
        size: rows of a block (B), a multiple of 16.
        sinks, locals: first and last whole blocks that are always kept.
        sets: the owner of a set of blocks, one of :data:`SETS`. "per_head": the floor(N / G) best of each head;
            "global": the N best of all (head, block) pairs of a layer; "per_layer": floor(N / G) blocks for all heads,
            those with the best scores, added over the heads.
        score: by what blocks are ordered, one of :data:`SCORES`.
        voters: the rows that score, one of :data:`VOTERS`.
        gated: attention is dense where choosing would cost more than it saves (:meth:`pays`).
    """

    budget: float = 0.1
    dense_below: int = 4096
    size: int = 64
    sinks: int = 1
    locals: int = 2
    sets: str = "per_head"
    score: str = "exact"
    voters: str = "root"
    gated: bool = False

    def num_blocks(self, prefix: int) -> int:
        """Whole blocks of a committed prefix."""
        return prefix // self.size

    def keep(self, prefix: int, num_groups: int) -> int:
        """Blocks to keep in a layer, over all heads; 0 if all are, so that attention is dense."""
        if prefix <= self.dense_below:
            return 0
        every = self.num_blocks(prefix) * num_groups
        length = (prefix - self.dense_below) * self.budget + self.dense_below
        count = math.floor(length * num_groups / self.size)
        if self.sets != "global":
            count = count // num_groups * num_groups
        count = max(count, max(1, self.sinks + self.locals) * num_groups)
        return 0 if count >= every else count

    def read(self, prefix: int, keep: int, num_groups: int) -> float:
        """Return the mean share of a committed prefix that a head reads: the kept blocks, and the rows after the
        last.
        """
        if not keep:
            return 1.0
        rest = prefix - self.num_blocks(prefix) * self.size
        return (keep * self.size / num_groups + rest) / prefix

    def pays(self, prefix: int, keep: int, num_groups: int, rows: int, share: float) -> bool:
        """Whether a step with so many rows costs less than dense attention, by the measured cost of scoring.

        Args:
            keep: from :meth:`keep`.
            share: of the layers, those that choose blocks.
        """
        scoring = _SCORING * self.num_voters(rows) * share if self.score == "exact" else 0.0
        return not self.gated or scoring < rows * (1 - self.read(prefix, keep, num_groups))

    def num_voters(self, rows: int) -> int:
        """Rows of a step that score, the first ones."""
        return rows if self.voters == "all" else 1

    def select(self, scores_GN: Tensor, keep: int) -> list[Tensor]:
        """The kept blocks of each head, ascending, int64; of equal scores the earlier head, then the earlier block.

        Args:
            scores_GN: float32, of the rule's kind.
            keep: from :meth:`keep`, not 0.
        """
        num_groups, num_blocks = scores_GN.shape
        order_GN = scores_GN.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN: a broken model
        order_GN[:, : self.sinks] = torch.inf
        order_GN[:, num_blocks - self.locals :] = torch.inf
        if self.sets == "global":
            best = order_GN.flatten().sort(descending=True, stable=True).indices[:keep].sort().values
            return [best[best // num_blocks == head] % num_blocks for head in range(num_groups)]
        if self.sets == "per_layer":
            together_N = order_GN.sum(dim=0)  # of a broken model infinities may meet
            together_N = together_N.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            best_K = together_N.sort(descending=True, stable=True).indices[: keep // num_groups].sort().values
            return [best_K] * num_groups
        best_GK = order_GN.sort(dim=-1, descending=True, stable=True).indices[:, : keep // num_groups]
        return list(best_GK.sort(dim=-1).values)


def weights_of_blocks(
    q_HD: Tensor,
    k_GLD: Tensor,
    size: int,
    num_blocks: int,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention weight that a row's heads give to each block, added over the heads of a group, float32 [G, N].

    Args:
        q_HD: the row's queries after rotary.
        k_GLD: the keys of all columns that the row sees, the blocks first, itself last.
        scaling, softcap, sinks_H: of the attention; see forward/dense.py.
    """
    num_groups = k_GLD.shape[0]
    q_GnD = q_HD.float().view(num_groups, -1, q_HD.shape[-1])
    scores_GnL = torch.matmul(q_GnD, k_GLD.float().transpose(1, 2)) * scaling
    if softcap is not None:
        scores_GnL = torch.tanh(scores_GnL / softcap) * softcap
    if sinks_H is not None:
        scores_GnL = torch.cat([scores_GnL, sinks_H.float().view(num_groups, -1, 1)], dim=-1)
    weights_GnL = torch.softmax(scores_GnL, dim=-1)
    return weights_GnL[..., : num_blocks * size].unflatten(-1, (num_blocks, size)).sum(dim=(1, 3))


def scores_of_summaries(q_HD: Tensor, summaries_GNW: Tensor) -> Tensor:
    """Return scores from block summaries, float32 [G, N]: W = D, mean; W = 2 D, bounds.

    Args:
        q_HD: the queries after rotary of a row, or of several rows, added.
        summaries_GNW: from :class:`BlockSummaries`.
    """
    num_groups, _, width = summaries_GNW.shape
    q_GD = q_HD.float().view(num_groups, -1, q_HD.shape[-1]).sum(dim=1)
    if width > q_GD.shape[-1]:  # whichever end is larger: the largest key where q is positive, else the smallest
        q_GD = torch.cat([q_GD.clamp(max=0), q_GD.clamp(min=0)], dim=-1)
    return torch.matmul(summaries_GNW, q_GD[:, :, None])[:, :, 0]


class BlockSummaries:
    """Means or bounds of one cache's blocks, updated layer by layer on access.

    Args:
        cache: provides the keys; this object becomes a follower of it.
        size: rows of a block (B).
        score: "mean" or "bounds".
    """

    def __init__(self, cache: KVCache, size: int, score: str) -> None:
        self.size = size
        self._sum_up = SUMMARIES[score]
        self._cache = cache
        self._summaries: list[Tensor | None] = [None] * cache.num_layers
        # per layer and slot, how many blocks are known
        self._known = [[0] * cache.max_slots for _ in range(cache.num_layers)]
        cache.followers.add(self)

    def of(self, layer: int, slots: Sequence[int]) -> Tensor:
        """The layer's, float32 [S, G, N, W]; of these slots all whole committed blocks are valid."""
        cache, size = self._cache, self.size
        layer = cache.sources.get(layer, layer)
        known = self._known[layer]
        keys_SGCD = cache.keys[layer]
        assert keys_SGCD is not None, "a slot with committed rows has keys"
        summaries = self._room(layer, keys_SGCD)
        for slot in slots:
            begin, end = known[slot], cache.lengths[slot] // size
            if begin < end:
                with torch.inference_mode():
                    rows_GRD = keys_SGCD[slot, :, begin * size : end * size]
                    summaries[slot, :, begin:end] = self._sum_up(rows_GRD.unflatten(1, (end - begin, size)))
                known[slot] = end
        return summaries

    def shortened(self, slot: int, length: int) -> None:
        """Forget blocks that are no longer whole."""
        whole = length // self.size
        for known in self._known:
            known[slot] = min(known[slot], whole)

    def _room(self, layer: int, keys_SGCD: Tensor) -> Tensor:
        old = self._summaries[layer]
        num_slots, num_groups, capacity, _ = keys_SGCD.shape
        if old is not None and old.shape[0] >= num_slots and old.shape[2] >= capacity // self.size:
            return old
        with torch.inference_mode():
            width = self._sum_up(keys_SGCD[:1, :, None, :1]).shape[-1]
            shape = (num_slots, num_groups, capacity // self.size, width)
            new = torch.empty(shape, dtype=torch.float32, device=keys_SGCD.device)
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
        self._summaries[layer] = new
        return new


def _means(keys_GNBD: Tensor) -> Tensor:
    return keys_GNBD.mean(dim=-2, dtype=torch.float32)


def _bounds(keys_GNBD: Tensor) -> Tensor:
    return torch.cat([keys_GNBD.amin(dim=-2), keys_GNBD.amax(dim=-2)], dim=-1).float()


# score -> function from keys of blocks [G, N, B, D] to summaries, float32 [G, N, W]
SUMMARIES: Mapping[str, Callable[[Tensor], Tensor]] = {"bounds": _bounds, "mean": _means}
