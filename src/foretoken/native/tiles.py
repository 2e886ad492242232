"""Tiles of packed weights, written by all threads of the team: what their makers share.

Letters: C bytes of a tile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from foretoken.native import team
from foretoken.native.declared import ADDRESS, function
from foretoken.native.pages import empty_in_large_pages

_SMALL = 1 << 22  # bytes that one thread packs in less time than others take to start


def tile_memory(outputs: int, tile_bytes: int) -> Tensor:
    """uint8 [tiles, C], to be written, for so many outputs."""
    return empty_in_large_pages((-(-outputs // 16), tile_bytes), torch.uint8)


def by_all_threads(pack: Callable[[int, int], None], count: int, num_bytes: int) -> None:
    """Call a native function from all threads of the team, each for some tiles or rows.

    Args:
        pack: called with the first of them, and the first that is another's.
        count: of tiles or rows.
        num_bytes: that are written; few are written by one thread.
    """
    threads = 1 if num_bytes < _SMALL else team.current().threads
    each = -(-count // threads)
    if threads == 1:
        pack(0, count)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: pack(first, min(first + each, count)), range(0, count, each)))


def numbers_and_addresses(library: ctypes.CDLL, name: str, arguments: str) -> Callable[..., int]:
    """A function of the library; its arguments are numbers ("q") and addresses ("a")."""
    return function(library, name, *(ctypes.c_int64 if each == "q" else ADDRESS for each in arguments))
