"""Two alternating host buffers: one is filled while the other is copied to its destination.

    engine's thread    put 1 ──── put 2 ──── put 1 …        waits until the buffer is free
    lane                  take 1 ──── take 2 ──── take 1    copies to its memory or device; then the buffer is free

For a CUDA device the buffers are pinned, and a buffer is free when its copy has ended.

Letters: T rows, W width.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_BUFFERS = 2


class _Buffer:
    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.rows_TW: Tensor | None = None


class Staged:
    """Rows in a buffer, until they are copied out."""

    def __init__(self, buffer: _Buffer, counts: Sequence[int], device: torch.device) -> None:
        self._buffer, self._counts, self._device = buffer, list(counts), device

    def take(self) -> list[Tensor]:
        """Return copies on the device, [T, W] each, and free the buffer."""
        assert self._buffer.rows_TW is not None
        try:
            rows_TW = self._buffer.rows_TW[: sum(self._counts)]
            if self._device.type == "cuda":
                copy_TW = rows_TW.to(self._device, non_blocking=True)
                copied = torch.cuda.Event(blocking=True)  # a spinning wait would take a core from the target
                copied.record()
                copied.synchronize()
            else:
                copy_TW = rows_TW.clone()
        finally:
            self._buffer.free.set()
        return list(copy_TW.split(self._counts))


class Staging:
    """The buffers of one drafter.

    Args:
        width: W.
        dtype: dtype of the transferred rows.
        device: destination.

    Attributes:
        num_bytes: bytes put so far.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self._buffers = [_Buffer() for _ in range(_BUFFERS)]
        self._turn = 0
        self.num_bytes = 0

    def put(self, pieces: Sequence[Tensor]) -> Staged:
        """Fill the next buffer with rows, [T, W] each; wait until it is free."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        self._wait(buffer)
        counts = [len(each) for each in pieces]
        if buffer.rows_TW is None or len(buffer.rows_TW) < sum(counts):
            pinned = self._device.type == "cuda"
            buffer.rows_TW = torch.empty(2 * sum(counts), self._width, dtype=self._dtype, pin_memory=pinned)
        begin = 0
        for each, count in zip(pieces, counts, strict=True):
            buffer.rows_TW[begin : begin + count].copy_(each)
            begin += count
        self.num_bytes += begin * self._width * self._dtype.itemsize
        return Staged(buffer, counts, self._device)

    def _wait(self, buffer: _Buffer) -> None:
        buffer.free.wait()
        buffer.free.clear()
