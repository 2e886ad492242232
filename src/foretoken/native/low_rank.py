"""Adapters for native code: the corrections of a layer's packed weights, and which rows of a forward have which.

Letters: R rank, K inputs, O outputs, N tiles of 16 outputs.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.forward.adapter import LowRank
from foretoken.forward.batch import PackedBatch
from foretoken.native import structs

QKV, OUT, GATE_UP, DOWN = range(4)  # the packed weights of a layer, as low_rank.inc numbers them


class Part(NamedTuple):
    """The correction of some tiles of a packed weight.

    Attributes:
        product: its outputs are those tiles'.
        tiles: their indices, in the order of its outputs.
        num_tiles: of the whole weight.
    """

    product: LowRank
    tiles: Sequence[int]
    num_tiles: int


class PackedAdapter:
    """One adapter.

    Args:
        num_layers: of the decoder.
        parts: corrections by layer and weight.
    """

    def __init__(self, num_layers: int, parts: Mapping[tuple[int, int], Sequence[Part]]) -> None:
        self._native = (structs.LowRank * (4 * num_layers))()
        self._keep: list[Tensor] = []
        self.address = ctypes.addressof(self._native)
        self.rank = 0
        for (layer, which), own in parts.items():
            self._describe(self._native[4 * layer + which], own)

    def _describe(self, native: structs.LowRank, parts: Sequence[Part]) -> None:
        down_RK = torch.cat([part.product.down_RK for part in parts])
        rank = -(-len(down_RK) // 16) * 16
        down_KR = F.pad(down_RK.T, (0, rank - len(down_RK))).contiguous()
        up_NR16 = torch.zeros(parts[0].num_tiles, rank, 16)
        spans_N2 = torch.zeros(parts[0].num_tiles, 2, dtype=torch.int32)
        begin = 0
        for part in parts:
            tiles, own = torch.tensor(part.tiles), part.product.up_OR.shape[1]
            up_NR16[tiles, begin : begin + own] = part.product.up_OR.view(len(tiles), 16, own).transpose(1, 2)
            spans_N2[tiles] = torch.tensor([begin, begin + own], dtype=torch.int32)
            begin += own
        self._keep += [down_KR, up_NR16, spans_N2]
        native.down, native.up, native.spans = (each.data_ptr() for each in (down_KR, up_NR16, spans_N2))
        native.rank = rank
        self.rank = max(self.rank, rank)


class RowAdapters:
    """The corrections of each row of a batch.

    Attributes:
        rows: addresses, None for a row without an adapter.
        rank: the largest of a correction.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self.rows = (structs.P * len(batch.tokens))()
        self.rank = 0
        for segment in batch.segments:
            if segment.adapter is None:
                continue
            packed = segment.adapter.packed
            if packed is None:
                raise ValueError(f"adapter '{segment.adapter.name}' was not made for this decoder")
            self.rank = max(self.rank, packed.rank)
            self.rows[segment.start : segment.start + segment.num_rows] = [packed.address] * segment.num_rows
