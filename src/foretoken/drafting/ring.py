"""A ring buffer of the keys and values of each request's last tokens; its memory does not grow with the context.

    position p            is written at index p mod N and again at N + p mod N, over the token at p - N
    the last N tokens     are contiguous: they end at index N or before, or at the last token's second index
    a draft's rows        follow that end, the root first; they are written before they are read

Keys and values follow from tokens and positions alone. So before a read the ring is compared with the request's tokens:
if these continue the ring's contents, the new ones are added; if earlier tokens differ (after a rollback, or in another
request), the ring is filled again from the last N tokens. A draft's rows are never part of it.

A row's index depends on its position alone, so the order of summation does not depend on a request's history.

Letters: G key/value heads, N the ring's size, T tokens, R rows of a draft, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.forward.cache import KVCache

_SLOTS = 1024  # most requests at once; memory grows with use


class Ring:
    """The last ``size`` tokens of each slot.

    Args:
        size: N.
        spare: most rows of a draft, its root included.
        kv_heads, head_dim: G and d.
        dtype, device: of keys and values.
    Attributes:
        cache: the memory, a cache of one layer; its lengths are not used.
    """

    def __init__(
        self, size: int, spare: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        self.cache = KVCache(1, _SLOTS, 2 * size + spare)
        self.cache.reserve(0, 2 * size + spare)
        rows_G0d = torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.cache.buffers(0, rows_G0d, rows_G0d)
        self._held: dict[int, list[int]] = {}  # slot in use -> its tokens, the last one at position ends - 1
        self._ends: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots that were in use at once; independent of the requests' lengths."""
        return self.cache.num_bytes

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return len(self._held)

    def acquire(self) -> int:
        """Take an empty slot."""
        slot = self.cache.acquire()
        self._held[slot], self._ends[slot] = [], 0
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        del self._held[slot], self._ends[slot]
        self.cache.release(slot)

    def missing(self, slot: int, tokens: Sequence[int], end: int) -> int:
        """Return the first position that :meth:`write` must add; ``end`` if none is missing.

        Drops the slot's contents if they are not a part of these tokens.

        Args:
            end: position after the last token that the ring is to hold.
        """
        held, before = self._held[slot], self._ends[slot]
        oldest = max(0, end - self.size)
        if before > end or list(tokens[before - len(held) : before]) != held:
            self._held[slot], self._ends[slot] = [], oldest
            return oldest
        return max(before, oldest)

    def write(self, slot: int, begin: int, tokens: Sequence[int], k_GTd: Tensor, v_GTd: Tensor) -> None:
        """Add missing tokens.

        Args:
            begin: position of the first one, from :meth:`missing`.
            tokens: at most ``size`` of them.
        """
        keys_GCd, values_GCd = self._buffers(slot)
        first_T = torch.arange(begin, begin + len(tokens), device=keys_GCd.device) % self.size
        for places_T in (first_T, first_T + self.size):
            keys_GCd.index_copy_(1, places_T, k_GTd)
            values_GCd.index_copy_(1, places_T, v_GTd)
        before = self._held[slot] if begin == self._ends[slot] else []
        self._held[slot] = [*before, *tokens][-self.size :]
        self._ends[slot] = begin + len(tokens)

    def place(self, slot: int) -> int:
        """Index of the root, which follows the last token."""
        end = self._ends[slot]
        return end if end <= self.size else (end - 1) % self.size + self.size + 1

    def draft(self, slot: int, first: int, k_GRd: Tensor, v_GRd: Tensor) -> None:
        """Write rows of a draft after the tokens; they are valid until the next :meth:`write`.

        Args:
            first: number of the draft's rows that are there already.
        """
        begin = self.place(slot) + first
        for part_GCd, new_GRd in zip(self._buffers(slot), (k_GRd, v_GRd), strict=True):
            part_GCd[:, begin : begin + new_GRd.shape[1]] = new_GRd

    def read(self, slot: int, most: int, rows: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values of at most ``most`` last tokens, then of ``rows`` rows of a draft: [G, ., d]."""
        end = self.place(slot)
        begin = end - min(most, len(self._held[slot]))
        keys_GCd, values_GCd = self._buffers(slot)
        return keys_GCd[:, begin : end + rows], values_GCd[:, begin : end + rows]

    def _buffers(self, slot: int) -> tuple[Tensor, Tensor]:
        keys_SGCd, values_SGCd = self.cache.keys[0], self.cache.values[0]
        assert keys_SGCd is not None
        assert values_SGCd is not None
        return keys_SGCd[slot], values_SGCd[slot]
