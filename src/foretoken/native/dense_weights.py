"""Dense weights in the order of native products, as they are or rounded, by all threads; see dense_weights.h.

Letters: O outputs, K inputs, G groups, C bytes of a tile.
"""

import ctypes

import torch
from torch import Tensor

from foretoken.forward.stored_weight import RoundedWeight
from foretoken.native.quantised import CodedTiles
from foretoken.native.tiles import by_all_threads, numbers_and_addresses, tile_memory

_LINE = 64
_READ = (torch.float32, torch.bfloat16)


def write_tiles(weight_OK: Tensor, to: Tensor, library: ctypes.CDLL) -> None:
    """Write a contiguous weight as packing.py describes; outputs are padded with zeros to a whole tile.

    Args:
        weight_OK: float32 or bfloat16; its rows are whole units.
        to: [O / 16, K / unit, 16, unit], perhaps every other tile of a larger pack.
        library: compiled decoder.c.
    """
    tile = numbers_and_addresses(library, "foretoken_tile", "aqqqqaq")
    outputs, units = weight_OK.shape[0], to.shape[1]

    def write(first: int, end: int) -> None:
        tile(weight_OK.data_ptr(), outputs, units, first, end, to.data_ptr(), to.stride(0) * to.element_size())

    by_all_threads(write, len(to), to.numel() * to.element_size(), weight_OK)


def can_round(weight: RoundedWeight) -> bool:
    """Whether :func:`rounded_tiles` can."""
    dense_OK = weight.dense_OK
    whole = dense_OK.shape[1] % weight.group == 0 and weight.group % 16 == 0
    return dense_OK.dtype in _READ and dense_OK.device.type == "cpu" and dense_OK.is_contiguous() and whole


def find_parameters(weight: RoundedWeight, library: ctypes.CDLL) -> None:
    """Find a weight's scales by all threads, with the bits of :func:`quantised_weight.ranges`.

    Raises:
        ModelError: it is not finite.
    """
    call = numbers_and_addresses(library, "foretoken_ranges", "aqqqqqaa")

    def ranges(dense_OK: Tensor, group: int) -> tuple[Tensor, Tensor]:
        outputs, groups, bf16 = len(dense_OK), dense_OK.shape[1] // group, int(dense_OK.dtype == torch.bfloat16)
        low_OG, high_OG = torch.empty(outputs, groups), torch.empty(outputs, groups)

        def find(first: int, end: int) -> None:
            call(dense_OK.data_ptr(), bf16, groups, group, first, end, low_OG.data_ptr(), high_OG.data_ptr())

        by_all_threads(find, outputs, dense_OK.numel())
        return low_OG, high_OG

    weight.parameters(ranges)


def tile_bytes(weight: RoundedWeight) -> int:
    """Of a packed tile."""
    return _codes_at(weight) + 2 * weight.shape[1] * weight.bits


def _codes_at(weight: RoundedWeight) -> int:
    numbers = weight.shape[1] // weight.group * (1 + weight.minimum)
    return -(-numbers * 16 * weight.kept_in.itemsize // _LINE) * _LINE


def rounded_tiles(weight: RoundedWeight, library: ctypes.CDLL, into: Tensor | None = None) -> CodedTiles:
    """A weight rounded and packed in one go, with the bits of :func:`quantised_weight.rounded`.

    Args:
        into: uint8 [tiles, C], perhaps every other tile of a larger pack; None: memory of its own.
    Raises:
        ModelError: it is not finite.
    """
    find_parameters(weight, library)
    dense_OK, bits, group, kind = weight.dense_OK, weight.bits, weight.group, weight.kept_in
    outputs, inputs = dense_OK.shape
    given = [each for each in weight.parameters() if each is not None]
    kept = [each.to(kind) for each in given]
    data = tile_memory(outputs, tile_bytes(weight)) if into is None else into
    write_rounded = numbers_and_addresses(library, "foretoken_round_tiles", "aqqqqqaaaaqqqaq")

    def write(first: int, end: int) -> None:
        minimums = [None if len(each) < 2 else each[1].data_ptr() for each in (given, kept)]
        write_rounded(
            *(dense_OK.data_ptr(), int(dense_OK.dtype == torch.bfloat16), bits, outputs, inputs // group, group),
            *(given[0].data_ptr(), minimums[0], kept[0].data_ptr(), minimums[1]),
            *(int(kind == torch.float16), first, end, data.data_ptr(), data.stride(0)),
        )

    by_all_threads(write, len(data), data.numel(), dense_OK)
    return CodedTiles(data, inputs, bits, group, bits == 4, kind, 128 if bits == 8 else 0, weight.name)
