"""Which blocks of the committed prefix a verification looks at.

    prefix  |sink|    |    |    |    |local|local|rest|  root n0 n1 …      one block: ``size`` columns of one head
             kept   ×   kept  ×    ×   kept  kept  seen   seen, by the tree

Blocks are whole and committed. What lies behind the last whole block (less than one block) and the rows in flight are
always seen, and never selected: no row in flight can be part of a block.

Paper:   sparse verification, arXiv:2512.21911, "sparse attention": score(h, b) = mean over the block of q0 . k, q0 the
         root row's query; N = floor(((L - L0) rho + L0) H / B) blocks of a layer for a prefix of L > L0 rows, else all.
Differs: the paper does not give the number of sink and local blocks, nor the query of a group of heads. Ours: ``sinks``
         and ``locals``, which count towards N and are kept also where N is smaller; the sum over the group's query
         heads, which orders blocks as the mean of their scores does. Keys and queries are those after rotary.

A score that is linear in the keys can be taken from their mean: q . mean(k) = mean(q . k). So selecting costs one
product per block instead of one per row. A committed row never changes, so a block is averaged once, when it is whole
and committed. What the cache forgets (a rollback, a slot given back) it tells its followers.

Letters: H query heads, G key/value heads (the paper's H), S slots, N whole blocks, B rows of a block, D key width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRule:
    """How many blocks are kept, and which.

    Args:
        budget: share of the prefix beyond ``dense_below`` that is kept (rho), in (0, 1].
        dense_below: prefixes of at most so many rows are attended whole (L0).
        size: rows of a block (B), a multiple of 16.
        sinks, locals: first and last whole blocks that are always kept.
        across_heads: the N best of all (head, block) pairs of a layer; else floor(N / G) blocks of each head.
    """

    budget: float = 0.1
    dense_below: int = 4096
    size: int = 64
    sinks: int = 1
    locals: int = 2
    across_heads: bool = False

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
        if not self.across_heads:
            count = count // num_groups * num_groups
        count = max(count, max(1, self.sinks + self.locals) * num_groups)
        return 0 if count >= every else count

    def select(self, scores_GN: Tensor, keep: int) -> list[Tensor]:
        """The kept blocks of each head, ascending, int64; of equal scores the earlier head, then the earlier block.

        Args:
            scores_GN: float32, from :func:`scores`.
            keep: from :meth:`keep`, not 0.
        """
        num_groups, num_blocks = scores_GN.shape
        order_GN = scores_GN.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN: a broken model
        order_GN[:, : self.sinks] = torch.inf
        order_GN[:, num_blocks - self.locals :] = torch.inf
        if self.across_heads:
            best = order_GN.flatten().sort(descending=True, stable=True).indices[:keep].sort().values
            return [best[best // num_blocks == head] % num_blocks for head in range(num_groups)]
        best_GK = order_GN.sort(dim=-1, descending=True, stable=True).indices[:, : keep // num_groups]
        return list(best_GK.sort(dim=-1).values)


def scores(q_HD: Tensor, means_GND: Tensor) -> Tensor:
    """Mean product of the root's query with each block's keys, float32 [G, N].

    Args:
        q_HD: the root row's queries after rotary.
        means_GND: mean keys, float32 (methods/sparse/blocks.py).
    """
    num_groups = means_GND.shape[0]
    q_GD = q_HD.float().view(num_groups, -1, q_HD.shape[-1]).sum(dim=1)
    return torch.matmul(means_GND, q_GD[:, :, None])[:, :, 0]


class BlockMeans:
    """Means of one cache; those of a layer are brought up to date when they are asked for.

    Args:
        cache: whose keys; this becomes a follower of it.
        size: rows of a block (B).
    """

    def __init__(self, cache: KVCache, size: int) -> None:
        self.size = size
        self._cache = cache
        self._means: list[Tensor | None] = [None] * cache.num_layers
        # per layer and slot, how many blocks are known
        self._known = [[0] * cache.max_slots for _ in range(cache.num_layers)]
        cache.followers.add(self)

    def of(self, layer: int, slots: Sequence[int]) -> Tensor:
        """The layer's means, float32 [S, G, N, D]; of these slots all whole committed blocks are valid."""
        cache, known, size = self._cache, self._known[layer], self.size
        keys_SGCD = cache.keys[layer]
        assert keys_SGCD is not None, "a slot with committed rows has keys"
        means = self._room(layer, keys_SGCD)
        for slot in slots:
            begin, end = known[slot], cache.lengths[slot] // size
            if begin < end:
                with torch.inference_mode():
                    rows_GRD = keys_SGCD[slot, :, begin * size : end * size]
                    blocks_GNBD = rows_GRD.reshape(len(rows_GRD), end - begin, size, -1)
                    means[slot, :, begin:end] = blocks_GNBD.mean(dim=2, dtype=torch.float32)
                known[slot] = end
        return means

    def shortened(self, slot: int, length: int) -> None:
        """Forget blocks that are no longer whole."""
        whole = length // self.size
        for known in self._known:
            known[slot] = min(known[slot], whole)

    def _room(self, layer: int, keys_SGCD: Tensor) -> Tensor:
        old = self._means[layer]
        num_slots, num_groups, capacity, width = keys_SGCD.shape
        if old is not None and old.shape[0] >= num_slots and old.shape[2] >= capacity // self.size:
            return old
        with torch.inference_mode():
            shape = (num_slots, num_groups, capacity // self.size, width)
            new = torch.empty(shape, dtype=torch.float32, device=keys_SGCD.device)
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
        self._means[layer] = new
        return new
