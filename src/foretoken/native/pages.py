"""Memory for packed weights, in pages of 2 MiB where the system grants them.

A forward reads every weight once, so with pages of 4 KiB each of its threads looks up a page's place every 64 lines,
and waits. Linux grants large pages always, never, or on request (/sys/kernel/mm/transparent_hugepage/enabled).
"""

from __future__ import annotations

import ctypes
import math
import sys

import torch
from torch import Tensor

_PAGE = 2 << 20
_HUGE = 14  # MADV_HUGEPAGE of Linux


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy in large pages; a tensor smaller than such a page is returned as it is if it is contiguous."""
    size = tensor.numel() * tensor.element_size()
    if size < _PAGE or sys.platform != "linux":
        return tensor.contiguous()
    return empty_in_large_pages(size).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def empty_in_large_pages(*shape: int) -> Tensor:
    """uint8 to be written, aligned to 64 bytes; in large pages if it is at least as large as one."""
    size = math.prod(shape)
    if size < _PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=torch.uint8)
    room = torch.empty(size + _PAGE, dtype=torch.uint8)
    begin = -room.data_ptr() % _PAGE
    # advise before the first write; if the system refuses, pages stay small
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(room.data_ptr() + begin), ctypes.c_size_t(size // _PAGE * _PAGE), ctypes.c_int(_HUGE)
    )
    return room[begin : begin + size].view(shape)
