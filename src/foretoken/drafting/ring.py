"""Keys and values of the last tokens of each request, in memory that does not grow with its length.

    place of position p     p mod N, and once more N behind it       a token takes the places of the one N before it
    the last N of them      end at place N or before it, or with the second place of the last: one piece in any case
    a draft's rows          behind that end, the root first: places that are written before they are read

What is kept follows from the tokens and their positions alone, so a ring is compared with a request's tokens before it
is read: where they go on, the new ones are added; where anything before them changed (rolled back, begun anew, given to
another request), it is filled again from the last N of them. A draft's rows are never part of it.

The place of a row is its position modulo N, and nothing else: what is computed over places does not depend on a
request's history.

Letters: G key/value heads, N the ring's size, T tokens, R rows of a draft, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.forward.cache import KVCache

_SLOTS = 1024  # requests at once, at most; memory grows with use


class Ring:
    """The last ``size`` tokens of each slot.

    Args:
        size: N.
        spare: rows of a draft, at most, its root included.
        kv_heads, head_dim: G and d.
        dtype, device: of keys and values.
    Attributes:
        cache: of one layer, its memory; lengths mean nothing there.
    """

    def __init__(
        self, size: int, spare: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        self.cache = KVCache(1, _SLOTS, 2 * size + spare)
        self.cache.reserve(0, 2 * size + spare)
        rows_G0d = torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.cache.buffers(0, rows_G0d, rows_G0d)
        self._held: dict[int, list[int]] = {}  # of each slot in use: its tokens, the last one at position ends - 1
        self._ends: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held at present: of the slots that were in use at once, whatever the requests' lengths."""
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
        """The first position from which on :meth:`write` has to be given ``tokens``; ``end`` if none is missing.

        What the slot held is forgotten where it is not of these tokens.

        Args:
            end: behind the last token that the ring is to hold.
        """
        held, before = self._held[slot], self._ends[slot]
        oldest = max(0, end - self.size)
        if before > end or list(tokens[before - len(held) : before]) != held:
            self._held[slot], self._ends[slot] = [], oldest
            return oldest
        return max(before, oldest)

    def write(self, slot: int, begin: int, tokens: Sequence[int], k_GTd: Tensor, v_GTd: Tensor) -> None:
        """Add what was missing.

        Args:
            begin: position of the first one, as :meth:`missing` gave it.
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
        """Of the root: behind the last token."""
        end = self._ends[slot]
        return end if end <= self.size else (end - 1) % self.size + self.size + 1

    def draft(self, slot: int, first: int, k_GRd: Tensor, v_GRd: Tensor) -> None:
        """Put rows of a draft behind the tokens, until the next :meth:`write`.

        Args:
            first: how many rows stand there already.
        """
        begin = self.place(slot) + first
        for part_GCd, new_GRd in zip(self._buffers(slot), (k_GRd, v_GRd), strict=True):
            part_GCd[:, begin : begin + new_GRd.shape[1]] = new_GRd

    def read(self, slot: int, most: int, rows: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of the last tokens, ``most`` at most, and of so many rows of a draft: [G, ., d], in order."""
        end = self.place(slot)
        begin = end - min(most, len(self._held[slot]))
        keys_GCd, values_GCd = self._buffers(slot)
        return keys_GCd[:, begin : end + rows], values_GCd[:, begin : end + rows]

    def _buffers(self, slot: int) -> tuple[Tensor, Tensor]:
        keys_SGCd, values_SGCd = self.cache.keys[0], self.cache.values[0]
        assert keys_SGCd is not None
        assert values_SGCd is not None
        return keys_SGCd[slot], values_SGCd[slot]
