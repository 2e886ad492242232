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
        keys = [None if pair is None else pair[0] for pair in pairs]
        self._groups, self._row_bytes = (
            array("q", [0 if each is None else number(each) for each in keys])
            for number in (lambda each: each.shape[1], lambda each: each.shape[3] * each.element_size())
        )
        self._library = library
        self._generation = cache.generation
        self._whole = len(pairs) == cache.num_layers
        self._capacity, tiles = cache.capacity, -(-cache.capacity // _TILE)
        with torch.inference_mode(False):
            self._known_LSG = torch.zeros(len(pairs), cache.num_slots, max(self._groups, default=0), dtype=torch.int32)
            self._tiled = [
                empty_rows(self._known_LSG, (cache.num_slots, groups, tiles, size // 4 * _TILE)) if groups else None
                for groups, size in zip(self._groups, self._row_bytes, strict=True)
            ]
        self.keys = _addresses(keys)
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
        within = 0 <= slot < self._known_LSG.shape[1] and 0 <= to <= rows[0] and rows[-1] < self._capacity
        if not within or any(row >= after for row, after in pairwise(rows)):
            raise ValueError(
                f"rows {list(rows)} of slot {slot} cannot go to {to}: increasing, and below {self._capacity}"
            )
        source = array("q", rows)
        call = structs.Move(
            num_layers=len(self._groups),
            slot=slot,
            capacity=self._capacity,
            kv_heads=self._groups.buffer_info()[0],
            row_bytes=self._row_bytes.buffer_info()[0],
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
