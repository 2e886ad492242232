"""Weights in the superblocks of a GGUF file, in the order in which native products read them; see superblocks.h.

    blocks [O, R]  ──►  bytes [O / 16, superblocks of 16 outputs]

No bit is added: a packed weight has the size of the file's blocks, in Q6_K, Q3_K and IQ4_XS 1 to 3 % more.

Letters: O outputs, R bytes of a row, C bytes of a tile.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.forward.stored_weight import BlockKind, RoundedWeight, StoredWeight
from foretoken.native import structs
from foretoken.native.dense_weights import can_round, rounded_tiles
from foretoken.native.kept_tiles import kept_or_made
from foretoken.native.quantised import CodedTiles, are_alike, in_own_memory, joined
from foretoken.native.stored_blocks import pack_by_tiles, packed_blocks
from foretoken.native.structs import Matrix
from foretoken.native.tiles import described_dense, numbers_and_addresses, tile_memory

_INPUTS, _LINE = 256, 64


class _Form(NamedTuple):
    """Bits of a code, its offset, packed bytes of a block's scales, and lines of 64 bytes of 16 blocks."""

    bits: int
    offset: int
    scales: int
    lines: int


_FORMS = {
    "Q2_K": _Form(2, 0, 16, 21),
    "Q3_K": _Form(3, 4, 12, 28),
    "Q4_K": _Form(4, 0, 12, 36),
    "Q5_K": _Form(5, 0, 12, 44),
    "Q6_K": _Form(6, 32, 16, 53),
    "IQ4_XS": _Form(4, 128, 8, 35),
}


def _number(kind: BlockKind) -> int:
    """In native code."""
    return structs.SUPERBLOCKS[kind.name.lower()]


@dataclass(frozen=True, slots=True, eq=False)
class SuperblockTiles(CodedTiles):
    """A weight in packed superblocks, or some tiles of one.

    Attributes:
        stored: how the file has it.
        library: of the functions that pack and unpack.
    """

    stored: BlockKind = field(kw_only=True)
    library: ctypes.CDLL = field(kw_only=True)

    @property
    def form(self) -> tuple[object, ...]:
        """All but the tiles."""
        return self.inputs, self.stored.name

    def described(self) -> Matrix:
        """For native code."""
        matrix = CodedTiles.described(self)
        matrix.superblock = _number(self.stored)
        return matrix

    def parts(self) -> list[Tensor]:
        """Views [tiles, X, 16, Y]: of every superblock the halves, the scales' bytes and the codes."""
        scales, found = 16 * _FORMS[self.stored.name].scales, []
        for each in self.data.chunk(self.inputs // _INPUTS, dim=1):
            found.append(each[:, :_LINE].unflatten(1, (2, 16, 2)))
            found.append(each[:, _LINE : _LINE + scales].unflatten(1, (-1, 16, 1)))
            found.append(each[:, _LINE + scales :].unflatten(1, (-1, 16, 4)))
        return found

    def weight(self, outputs: int) -> StoredWeight:
        """The packed weight's first so many outputs, in the blocks of the file; a copy."""
        kind, count = self.stored, self.inputs // _INPUTS
        blocks_OR = torch.empty(outputs, count * kind.bytes, dtype=torch.uint8)
        unpack = numbers_and_addresses(self.library, "foretoken_unpack_superblocks", "qaqqqa")
        tiles, stride = self.data.data_ptr(), self.data.stride(0)
        unpack(_number(kind), tiles, stride, outputs, count, blocks_OR.data_ptr())
        return StoredWeight(blocks_OR, kind, self.name)


class MixedTiles:
    """Packed weights of the same inputs in several forms, one below the other.

    Args:
        runs: each with whole tiles of outputs, but perhaps the last; the first is quantised, the last may be dense.
    """

    def __init__(self, runs: Sequence[CodedTiles | Tensor]) -> None:
        self.runs = list(runs)

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __getitem__(self, tiles: slice) -> CodedTiles | Tensor:
        """Tiles of one form.

        Raises:
            ValueError: these are of several forms.
        """
        begin, end, _ = tiles.indices(len(self))
        for each in self.runs:
            if begin < len(each):
                if end <= len(each):
                    return each[begin : end : tiles.step or 1]
                break
            begin, end = begin - len(each), end - len(each)
        raise ValueError(f"tiles {tiles.start} to {tiles.stop} are packed in several forms")

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.runs[0].device

    def described(self) -> Matrix:
        """For native code, which reads the others as long as this lives."""
        return self._chain[0]

    @cached_property
    def _chain(self) -> list[Matrix]:
        found = [each.described() if isinstance(each, CodedTiles) else described_dense(each) for each in self.runs]
        for matrix, rest, run in zip(found, found[1:], self.runs, strict=False):
            matrix.own_tiles, matrix.rest = len(run), ctypes.addressof(rest)
        return found


def together(weights: Sequence[QuantisedWeight], library: ctypes.CDLL) -> CodedTiles | MixedTiles:
    """Weights of the same inputs packed one below the other, each kind in its own form.

    Args:
        weights: the outputs of all but the last are multiples of 16.
        library: compiled decoder.c, which packs superblocks.
    """
    runs: list[list[QuantisedWeight]] = []
    for each in weights:
        if runs and are_alike([runs[-1][0], each]):
            runs[-1].append(each)
        else:
            runs.append([each])
    packed = []
    for run in runs:
        if all(isinstance(each, RoundedWeight) for each in run):
            made = kept_or_made([each.name for each in run], partial(_rounded_below_each_other, run, library))
            packed += [made] if isinstance(made, CodedTiles) else made
        else:
            packed.append(packed_codes(joined(run), library))
    return packed[0] if len(packed) == 1 else MixedTiles(packed)


def _rounded_below_each_other(
    weights: Sequence[QuantisedWeight], library: ctypes.CDLL
) -> CodedTiles | list[CodedTiles]:
    """Packed weights as one, if they have one form: each may keep its scales in float16 or float32."""
    packed = [packed_codes(each, library) for each in weights]
    if any(each.form != packed[0].form for each in packed):
        return packed
    whole = tile_memory(16 * sum(map(len, packed)), packed[0].data.shape[1])
    torch.cat([each.data for each in packed], out=whole)
    return packed[0].like(whole)


def packed_codes(weight: QuantisedWeight, library: ctypes.CDLL, into: Tensor | None = None) -> CodedTiles:
    """A weight packed; outputs are padded with zeros to a whole tile.

    Args:
        library: compiled decoder.c, which packs the blocks of a file.
        into: where a weight in blocks, or one to round, is written, uint8 [tiles, C]; None: memory of its own.
    """
    if isinstance(weight, RoundedWeight) and can_round(weight):
        return rounded_tiles(weight, library, into)
    if not isinstance(weight, StoredWeight):
        return in_own_memory(weight)
    return (_in_superblocks if weight.kind.name in _FORMS else packed_blocks)(weight, library, into)


def _in_superblocks(weight: StoredWeight, library: ctypes.CDLL, into: Tensor | None) -> SuperblockTiles:
    outputs, inputs = weight.shape
    kind, count = weight.kind, inputs // _INPUTS
    form = _FORMS[kind.name]
    data = tile_memory(outputs, count * form.lines * _LINE) if into is None else into
    pack_by_tiles(library, "foretoken_pack_superblocks", _number(kind), weight, count, data)
    return SuperblockTiles(
        data=data,
        inputs=inputs,
        bits=form.bits,
        group=kind.group,
        minimum=len(kind.halves) == 2,
        kind=torch.float16,
        offset=form.offset,
        name=weight.name,
        table=kind.table,
        stored=kind,
        library=library,
    )
