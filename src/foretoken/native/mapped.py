"""Weights that are mapped from a file: after they have been packed, their pages need not stand in memory any longer.

A clean page of a private mapping can be left at any time: the next access reads the file again. A page that was written
would be lost, so a tensor with any such page is left alone.
"""

import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

# of an entry of Linux's page map; bit 63: the page is in memory
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
_DONTNEED = 4  # MADV_DONTNEED of Linux


def leave(tensor: Tensor) -> None:
    """Let the pages that lie wholly within a tensor leave this process's memory, if a clean mapped file holds them."""
    size = tensor.numel() * tensor.element_size()
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous() or size < mmap.PAGESIZE:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin and _is_clean(begin, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_DONTNEED))


def _is_clean(begin: int, end: int) -> bool:
    """Whether all of these pages that are in memory are a file's, none of them written."""
    count = (end - begin) // mmap.PAGESIZE
    try:
        with Path("/proc/self/pagemap").open("rb") as pages:
            pages.seek(begin // mmap.PAGESIZE * 8)
            found = pages.read(count * 8)
    except OSError:
        return False
    if len(found) != count * 8:
        return False
    facts = torch.frombuffer(bytearray(found), dtype=torch.int64)
    present, swapped, of_file = facts < 0, facts & _SWAPPED != 0, facts & _OF_FILE != 0
    return not bool((swapped | present & ~of_file).any())
