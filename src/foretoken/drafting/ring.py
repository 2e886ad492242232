"""Keys and values of the last tokens of each request, in memory that does not grow with its length.

    slot of position p    p mod size        a token takes the place of the one that is ``size`` before it

What is kept follows from the tokens and their positions alone, so a ring is compared with a request's tokens before it
is read: where they go on, the new ones are added; where anything before them changed (rolled back, begun anew, given to
another request), it is filled again from the last ``size`` of them. A draft's rows never enter it.

Letters: S slots, G key/value heads, N the ring's size, T tokens, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Ring:
    """The last ``size`` tokens of each slot.

    Args:
        size: N.
        kv_heads, head_dim: G and d.
        dtype, device: of keys and values.
    """

    def __init__(self, size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self._shape = (kv_heads, size, head_dim)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._held: list[list[int]] = []  # of each slot: its tokens, the last one at position ends - 1
        self._ends: list[int] = []
        self._free: list[int] = []
        self._dtype, self._device = dtype, device

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
        places_T = (torch.arange(begin, begin + len(tokens)) % self.size).to(k_GTd.device)
        self._keys[slot].index_copy_(1, places_T, k_GTd)
        self._values[slot].index_copy_(1, places_T, v_GTd)
        before = self._held[slot] if begin == self._ends[slot] else []
        self._held[slot] = [*before, *tokens][-self.size :]
        self._ends[slot] = begin + len(tokens)

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens held, [G, N or fewer, d], in the order of :meth:`ages`."""
        count = len(self._held[slot])
        return self._keys[slot][:, :count], self._values[slot][:, :count]

    def ages(self, slot: int) -> Tensor:
        """How many tokens before the last one each of them stands, int64 [N or fewer]."""
        count, last = len(self._held[slot]), self._ends[slot] - 1
        return (last - torch.arange(count)) % self.size
