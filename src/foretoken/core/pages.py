"""Memory for packed weights and for keys and values, in pages of 2 MiB where the system grants them.

A forward reads each of them once, so with pages of 4 KiB each of its threads looks up a page's place every 64 lines,
and waits. Linux grants large pages always, never, or on request (/sys/kernel/mm/transparent_hugepage/enabled).
"""

import ctypes
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 2 << 20


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy in large pages; a tensor smaller than such a page is returned as it is if it is contiguous."""
    if tensor.numel() * tensor.element_size() < _PAGE:
        return tensor.contiguous()
    return empty_in_large_pages(tensor.shape, tensor.dtype).copy_(tensor)


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory to be written, in large pages if it is no smaller than one."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    size = empty.numel() * empty.element_size()
    if size < _PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    # memory of its own: the heap's may have been written before, and then its pages stay small
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # where the system grants none, pages stay small
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -room.data_ptr() % _PAGE
    return room[begin : begin + size].view(dtype).view(shape)


def give_back_free_memory() -> None:
    """Return what the heap holds without use to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
