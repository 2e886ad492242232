"""Weights in the blocks of a GGUF file: packed for native products, and looked up as an embedding; see stored_blocks.h.

Letters: O outputs, R bytes of a row, C bytes of a tile.
"""

import ctypes

import torch
from torch import Tensor

from foretoken.forward.stored_weight import StoredWeight
from foretoken.native import structs
from foretoken.native.quantised import CodedTiles
from foretoken.native.tiles import by_all_threads, numbers_and_addresses, tile_memory

_LINE = 64
_CODES_FROM_0 = frozenset({"Q4_1"})  # kinds that have no negative codes


def block_number(kind: str) -> int:
    """Of a kind of blocks, by ggml's name, in native code."""
    return structs.BLOCKS[f"{kind.lower()}_blocks"]


def packed_blocks(weight: StoredWeight, library: ctypes.CDLL, into: Tensor | None = None) -> CodedTiles:
    """A weight in blocks of 32 elements, packed as quantised.h says; outputs are padded with zeros to a whole tile.

    Args:
        library: compiled decoder.c.
        into: uint8 [tiles, C], perhaps every other tile of a larger pack; None: memory of its own.
    """
    outputs, inputs = weight.shape
    kind, count = weight.kind, inputs // 32
    head, bits = -(-count * 16 * kind.scale_bytes // _LINE) * _LINE, 4 if kind.packs_as_it_is else kind.bits
    data = tile_memory(outputs, head + 2 * inputs * bits) if into is None else into
    pack_by_tiles(library, "foretoken_pack_blocks", block_number(kind.name), weight, count, data)
    offset = 0 if kind.name in _CODES_FROM_0 else 2 ** (kind.bits - 1)
    scales = torch.float16 if kind.halves else torch.float32
    return CodedTiles(data, inputs, bits, 32, kind.minimum, scales, offset, weight.name, table=kind.table)


def pack_by_tiles(
    library: ctypes.CDLL, name: str, kind: int, weight: StoredWeight, blocks_of_row: int, data: Tensor
) -> None:
    """Let all threads of the team pack some tiles each.

    Args:
        library: compiled decoder.c.
        name: of its function.
        kind: of the blocks, as that function has it.
        blocks_of_row: how many.
        data: uint8 [tiles, C].
    """
    pack = numbers_and_addresses(library, name, "qaqqqqaq")
    blocks_OR, outputs = weight.blocks_OR.contiguous(), weight.shape[0]

    def pack_some(first: int, end: int) -> None:
        pack(kind, blocks_OR.data_ptr(), outputs, blocks_of_row, first, end, data.data_ptr(), data.stride(0))

    by_all_threads(pack_some, len(data), data.numel(), blocks_OR)
