"""Tiles of packed weights, written by all threads of the team: what their makers share.

Letters: C bytes of a tile.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from foretoken.core.pages import empty_in_large_pages
from foretoken.native import team
from foretoken.native.declared import ADDRESS, function
from foretoken.native.mapped import leave
from foretoken.native.structs import Matrix

_SMALL = 1 << 22  # bytes that one thread packs in less time than others take to start
_PART = 1 << 26  # bytes of a mapped file that may be in memory next to their packed twins


def tile_memory(outputs: int, tile_bytes: int) -> Tensor:
    """uint8 [tiles, C], to be written, for so many outputs."""
    return empty_in_large_pages((-(-outputs // 16), tile_bytes), torch.uint8)


def described_dense(packed: Tensor) -> Matrix:
    """The description of dense tiles for native code."""
    return Matrix(tiles=packed.data_ptr(), stride=packed.stride(0) * packed.element_size())


def by_all_threads(pack: Callable[[int, int], None], count: int, num_bytes: int, read: Tensor | None = None) -> None:
    """Call a native function from all threads of the team, each for some tiles or rows.

    Args:
        pack: called with the first of them, and the first that is another's.
        count: of tiles or rows.
        num_bytes: that are written; few are written by one thread.
        read: rows that the function reads, 16 for a tile; of a large mapped file, parts leave memory as they are done.
    """
    parts = 1 if read is None else -(-read.numel() * read.element_size() // _PART)
    threads = 1 if num_bytes < _SMALL else team.current().threads
    if parts == threads == 1:
        pack(0, count)
        return
    part = -(-count // parts)
    each = -(-part // threads)
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, count, part):
            end = min(begin + part, count)
            firsts = range(begin, end, each)
            list(pool.map(pack, firsts, [min(first + each, end) for first in firsts]))
            if read is not None and parts > 1:
                leave(read[16 * begin : 16 * end])


def numbers_and_addresses(library: ctypes.CDLL, name: str, arguments: str) -> Callable[..., int]:
    """A function of the library; its arguments are numbers ("q") and addresses ("a")."""
    return function(library, name, *(ctypes.c_int64 if each == "q" else ADDRESS for each in arguments))
