"""Rotary tables that grow with the positions in use: a million of them would be gigabytes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_PIECE = 2048  # positions computed at once; always the same ones together, so that no value depends on the table's size


class Tables(NamedTuple):
    """cos and sin, float32 [N, half], and perhaps a factor of queries, [N]."""

    cos_Nh: Tensor
    sin_Nh: Tensor
    queries_N: Tensor | None = None


class RotaryTables:
    """cos and sin of positions 0 to N - 1, for the largest N requested so far.

    Args:
        at: positions int64 [N] -> cos and sin [N, half], and perhaps a factor of queries [N].
    """

    def __init__(self, at: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self._at = at
        self._tables = self._made(0, _PIECE)
        self.half = self._tables.cos_Nh.shape[1]

    def up_to(self, length: int) -> Tables:
        """Tables of ``length`` positions at least; hold them while the native side reads."""
        tables = self._tables
        held = len(tables.cos_Nh)
        if held < length:
            more = self._made(held, max(length, 2 * held))
            tables = Tables(
                *(torch.cat([a, b]) for a, b in zip(tables, more, strict=True) if a is not None and b is not None)
            )
            self._tables = tables  # whole, in one assignment: another thread may be reading the old ones
        return tables

    def forget(self) -> None:
        """Shrink the tables to their first size; tables that a caller holds stay as they are."""
        self._tables = Tables(*(each[:_PIECE].clone() for each in self._tables if each is not None))

    def _made(self, begin: int, end: int) -> Tables:
        with torch.inference_mode():
            pieces = [self._at(torch.arange(start, start + _PIECE)) for start in range(begin, end, _PIECE)]
            return Tables(*(torch.cat(each).float().contiguous() for each in zip(*pieces, strict=True)))
