"""The mean key of every whole committed block, kept beside the cache.

A score that is linear in the keys can be taken from their mean: q . mean(k) = mean(q . k). So selecting costs one
product per block instead of one per row.

A committed row never changes, so a block is averaged once, when it is whole and committed. What the cache forgets
(a rollback, a slot given back) it tells its followers.

Letters: S slots, G key/value heads, N blocks, B rows of a block, D key width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.models.cache import KVCache


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
