"""Keys and values of the last tokens of each request, in memory that does not grow with its length.

    place of position p    p mod N, and once more N behind it       a token takes the places of the one N before it
    the last m of them     ends with the second place of the last   one piece, whatever the position
    a draft's rows         behind that end                          in places that are written before they are read

What is kept follows from the tokens and their positions alone, so a ring is compared with a request's tokens before it
is read: where they go on, the new ones are added; where anything before them changed (rolled back, begun anew, given to
another request), it is filled again from the last N of them. A draft's rows are never part of it.

Letters: S slots, G key/value heads, N the ring's size, T tokens, R rows of a draft, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Ring:
    """The last ``size`` tokens of each slot.

    Args:
        size: N.
        spare: rows of a draft, at most.
        kv_heads, head_dim: G and d.
        dtype, device: of keys and values.
    """

    def __init__(
        self, size: int, spare: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        self._shape = (kv_heads, 2 * size + spare, head_dim)
        self._dtype, self._device = dtype, device
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._held: list[list[int]] = []  # of each slot: its tokens, the last one at position ends - 1
        self._ends: list[int] = []
        self._free: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held at present: of the slots that were in use at once, whatever the requests' lengths."""
        return sum(each.nbytes for each in (*self._keys, *self._values))

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return len(self._ends) - len(self._free)

    def acquire(self) -> int:
        """Take an empty slot."""
        if not self._free:
            for side in (self._keys, self._values):
                side.append(torch.zeros(self._shape, dtype=self._dtype, device=self._device))
            self._held.append([])
            self._ends.append(0)
            self._free.append(len(self._ends) - 1)
        slot = self._free.pop()
        self._held[slot], self._ends[slot] = [], 0
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def missing(self, slot: int, tokens: Sequence[int]) -> int:
        """The first position from which on :meth:`write` has to be given what ``tokens`` are; their number if nothing.

        What the slot held is forgotten where it is not of these tokens.
        """
        held, end = self._held[slot], self._ends[slot]
        oldest = max(0, len(tokens) - self.size)
        if end > len(tokens) or list(tokens[end - len(held) : end]) != held:
            self._held[slot], self._ends[slot] = [], oldest
            return oldest
        return max(end, oldest)

    def write(self, slot: int, begin: int, tokens: Sequence[int], k_GTd: Tensor, v_GTd: Tensor) -> None:
        """Add what was missing.

        Args:
            begin: position of the first one, as :meth:`missing` gave it.
            tokens: at most ``size`` of them.
        """
        first_T = torch.arange(begin, begin + len(tokens), device=self._device) % self.size
        for places_T in (first_T, first_T + self.size):
            self._keys[slot].index_copy_(1, places_T, k_GTd)
            self._values[slot].index_copy_(1, places_T, v_GTd)
        before = self._held[slot] if begin == self._ends[slot] else []
        self._held[slot] = [*before, *tokens][-self.size :]
        self._ends[slot] = begin + len(tokens)

    def draft(self, slot: int, first: int, k_GRd: Tensor, v_GRd: Tensor) -> None:
        """Put rows of a draft behind the tokens, until the next :meth:`write`.

        Args:
            first: how many rows stand there already.
        """
        begin = self._end(slot) + first
        self._keys[slot][:, begin : begin + k_GRd.shape[1]] = k_GRd
        self._values[slot][:, begin : begin + v_GRd.shape[1]] = v_GRd

    def read(self, slot: int, most: int, rows: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of the last tokens, ``most`` at most, and of so many rows of a draft: [G, ., d], in order."""
        end = self._end(slot)
        begin = end - min(most, len(self._held[slot]))
        return self._keys[slot][:, begin : end + rows], self._values[slot][:, begin : end + rows]

    def _end(self, slot: int) -> int:
        """Behind the second place of the last token."""
        return (self._ends[slot] - 1) % self.size + self.size + 1
