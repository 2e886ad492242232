"""Addresses of a cache's buffers for native code, and a tiled copy of its committed keys.

    keys     [S, G, C, D]                     rows as they are written; the general path reads them, too
    tiled    [S, G, C / 16, units, 16]        the keys of 16 positions side by side, for products

A committed row never changes, so a tile is laid out once, by the first forward after its 16 rows are
committed; every forward lays out the later tiles again. The cache notifies its followers when it drops rows. The copy
doubles the memory of the keys; without it every forward would lay out the whole prefix again.

Letters: S slots, G key/value heads, C capacity, D key width, L layers.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foretoken.forward.cache import KVCache, empty_rows
from foretoken.native import structs

_TILE = 16


class CacheAddresses:
    """Addresses of one cache's memory, valid until the cache reallocates it; this object follows the cache.

    Args:
        library: the compiled decoder; its functions move rows.
        cache: the owner of the pairs.
        pairs: keys and values of each layer, checked; None for a layer without.
    """

    def __init__(self, library: ctypes.CDLL, cache: KVCache, pairs: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        one = next((pair[0] for pair in pairs if pair is not None), torch.empty(cache.num_slots, 0, cache.capacity, 0))
        num_slots, num_groups, capacity, width = one.shape
        row_bytes = width * one.element_size()
        self._library = library
        self._generation = cache.generation
        self._whole = len(pairs) == cache.num_layers
        self._sizes = (len(pairs), num_groups, capacity, row_bytes)
        tiles = -(-capacity // _TILE)
        with torch.inference_mode(False):
            shape = (num_slots, num_groups, tiles, row_bytes // 4 * _TILE)
            self._known_LSG = torch.zeros(len(pairs), num_slots, num_groups, dtype=torch.int32)
            self._tiled = [None if pair is None else empty_rows(self._known_LSG, shape) for pair in pairs]
        self.keys = _addresses(None if pair is None else pair[0] for pair in pairs)
        self.values = _addresses(None if pair is None else pair[1] for pair in pairs)
        self.tiled = _addresses(self._tiled)
        self.known = _addresses(self._known_LSG)
        cache.followers.add(self)
        if self._whole:
            cache.mover = self

    def serves(self, cache: KVCache) -> bool:
        """Whether the cache's buffers still are where they were."""
        return self._generation == cache.generation

    def shortened(self, slot: int, length: int) -> None:
        """Forget tiles that are no longer whole."""
        if slot < self._known_LSG.shape[1]:
            self._known_LSG[:, slot].clamp_(max=length // _TILE)

    def move(self, cache: KVCache, slot: int, to: int, rows: Sequence[int]) -> bool:
        """Move rows of a slot to ``to`` and the rows after it, in all layers; False if the buffers were reallocated.

        Args:
            rows: increasing, none of them before its destination.
        Raises:
            ValueError: they are not, or lie outside of the buffers.
        """
        if not self.serves(cache):
            return False
        num_layers, num_groups, capacity, row_bytes = self._sizes
        within = 0 <= slot < self._known_LSG.shape[1] and 0 <= to <= rows[0] and rows[-1] < capacity
        if not within or any(row >= after for row, after in pairwise(rows)):
            raise ValueError(f"rows {list(rows)} of slot {slot} cannot go to {to}: increasing, and below {capacity}")
        source = array("q", rows)
        call = structs.Move(
            num_layers=num_layers,
            slot=slot,
            kv_heads=num_groups,
            capacity=capacity,
            row_bytes=row_bytes,
            to=to,
            count=len(source),
            keys=ctypes.addressof(self.keys),
            values=ctypes.addressof(self.values),
            from_rows=source.buffer_info()[0],
        )
        self._library.foretoken_move(ctypes.addressof(call))
        return True


def _addresses(tensors: Any) -> Any:
    found = [None if each is None else each.data_ptr() for each in tensors]
    return (structs.P * len(found))(*found)
