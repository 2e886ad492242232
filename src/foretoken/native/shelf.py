"""Memory for results, reused as soon as no tensor refers to it.

Fresh memory of some megabytes is taken from the system page by page at its first use, at every forward; that costs as
much as a layer. A tensor made here holds its memory as long as the tensor or a view of it lives.
"""

import sys
from collections import deque

import torch
from torch import Tensor

_MOST_BUFFERS, _MOST_BYTES = 4, 1 << 26


def _references(buffer: bytearray) -> int:
    return sys.getrefcount(buffer)


_FREE = _references(bytearray(1)) + 1  # of a buffer that only the caller of _references holds, in a variable


class Shelf:
    """A few buffers; a buffer is free when no tensor uses it."""

    def __init__(self) -> None:
        self._buffers: deque[bytearray] = deque()

    def take(self, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns], of any content."""
        count = 4 * rows * columns
        if not 0 < count <= _MOST_BYTES:
            return torch.empty(rows, columns)
        buffer = self._spare(count)
        values = torch.frombuffer(buffer, dtype=torch.float32, count=rows * columns).view(rows, columns)
        self._buffers.append(buffer)
        if len(self._buffers) > _MOST_BUFFERS:
            self._buffers.popleft()  # a tensor that uses it keeps it alive
        return values

    def _spare(self, count: int) -> bytearray:
        for _ in range(len(self._buffers)):
            try:
                buffer = self._buffers.popleft()  # taken out while it is looked at: another thread may be looking, too
            except IndexError:
                break
            if len(buffer) >= count and _references(buffer) <= _FREE:
                return buffer
            self._buffers.append(buffer)
        return bytearray(count)
