"""Quantised weights in the order in which the native products read them; quantised.h says which that is.

    codes [O, K], scales [O, G], minimums [O, G]  ──►  bytes [O / 16, parameters of all groups | codes]

Scales and minimums are kept in float16 where that is what they are, else in float32. Letters: O outputs, K inner
dimension, G groups, C bytes of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core.pages import empty_in_large_pages, in_large_pages
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.forward.stored_weight import TABLES, RoundedWeight, StoredWeight
from foretoken.native.structs import TABLES_OF_CODES, Matrix

_LINE = 64  # bytes
_ROWS = 4096  # outputs that are packed at a time, a multiple of 16


@dataclass(frozen=True, slots=True, eq=False)
class CodedTiles:
    """A packed quantised weight, or some tiles of one.

    Attributes:
        data: uint8 [tiles, C], C a multiple of 64.
        inputs: K.
        bits: 8 or 4.
        group: inputs that share a scale.
        minimum: whether there are minimums.
        kind: of scales and minimums, float16 or float32.
        offset: what was added to codes that begin below 0.
        name: of the tensor.
        order_K: int32, of which input a column is; None: they stand as the inputs do.
        table: of ``stored_weight.TABLES``: what codes of 4 bits stand for.
    """

    data: Tensor
    inputs: int
    bits: int
    group: int
    minimum: bool
    kind: torch.dtype
    offset: int
    name: str
    order_K: Tensor | None = None
    table: str = "no_table"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, tiles: slice) -> "CodedTiles":
        return self.like(self.data[tiles])

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device

    def like(self, data: Tensor) -> "CodedTiles":
        """Other tiles of the same kind."""
        return replace(self, data=data)

    def parts(self) -> list[Tensor]:
        """Views: parameters [tiles, G (scale, minimum), 16, 1] and codes [tiles, units, 16, 4]."""
        count, size = (2 if self.minimum else 1) * self.inputs // self.group, self.kind.itemsize
        parameters = self.data[:, : count * 16 * size].view(self.kind).unflatten(1, (count, 16, 1))
        codes = self.data[:, _lines(count * 16 * size) :].unflatten(1, (-1, 16, 4))
        return [parameters, codes]

    def described(self) -> Matrix:
        """For native code."""
        return Matrix(
            tiles=self.data.data_ptr(),
            stride=self.data.stride(0),
            bits=self.bits,
            group=self.group,
            half=int(self.kind == torch.float16),
            minimum=int(self.minimum),
            offset=self.offset,
            order=None if self.order_K is None else self.order_K.data_ptr(),
            table=TABLES_OF_CODES[self.table],
        )

    @property
    def form(self) -> tuple[object, ...]:
        """All but the tiles."""
        order = None if self.order_K is None else self.order_K.data_ptr()
        return self.inputs, self.bits, self.group, self.minimum, self.kind, self.offset, order, self.table

    def weight(self, outputs: int) -> QuantisedWeight:
        """What was packed, of the first so many outputs; a copy."""
        parameters, codes = self.parts()
        scale_OG, minimum_OG = parameters[..., 0].transpose(1, 2).reshape(16 * len(self), -1).float(), None
        if self.minimum:
            scale_OG, minimum_OG = scale_OG[:, 0::2].contiguous(), scale_OG[:outputs, 1::2].contiguous()
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        codes_OK = codes.transpose(1, 2).reshape(16 * len(self), self.inputs)[:outputs]
        if self.table != "no_table":
            codes_OK = TABLES[self.table][codes_OK.int()]
        elif self.offset:
            codes_OK = (codes_OK.to(torch.int16) - self.offset).to(torch.int8)
        scale_OG = scale_OG[:outputs].contiguous()
        order_K = None if self.order_K is None else self.order_K.long()
        bits = self.bits if self.table == "no_table" else 8
        return QuantisedWeight(codes_OK.contiguous(), scale_OG, minimum_OG, bits, order_K, self.name)


def coded_tiles(weight: QuantisedWeight, kind: torch.dtype | None = None) -> CodedTiles:
    """A weight packed; outputs are padded with zeros to a whole tile.

    Args:
        kind: of scales and minimums, which holds all of them; None: the smallest that does.
    """
    if not isinstance(weight, StoredWeight):
        weight = weight.decoded()
    kind = kind or weight.kept_in
    if weight.shape[0] > _ROWS:
        return _by_parts(weight, kind)
    weight = weight.decoded()
    (outputs, inputs), bits = weight.shape, weight.bits
    tiles = -(-outputs // 16)
    offset = 2 ** (bits - 1) if weight.codes_OK.dtype == torch.int8 else 0
    codes_OK = (weight.codes_OK.to(torch.int16) + offset).to(torch.uint8)
    given = [weight.scale_OG] if weight.minimum_OG is None else [weight.scale_OG, weight.minimum_OG]
    parameters_OGn = torch.stack(given, dim=-1)
    parameters = _padded(parameters_OGn.to(kind).flatten(1), tiles).view(tiles, 16, -1).transpose(1, 2).contiguous()
    codes = _padded(codes_OK, tiles).view(tiles, 16, -1, 4 if bits == 8 else 8)
    if bits == 4:
        codes = codes[..., :4] | codes[..., 4:] << 4
    head = parameters.flatten(1).view(torch.uint8)
    data = torch.cat(
        [head, head.new_zeros(tiles, _lines(head.shape[1]) - head.shape[1]), codes.transpose(1, 2).reshape(tiles, -1)],
        dim=1,
    )
    minimum = weight.minimum_OG is not None
    order_K = None if weight.order_K is None else weight.order_K.to(torch.int32)
    return CodedTiles(data, inputs, bits, weight.group, minimum, kind, offset, weight.name, order_K)


def _by_parts(weight: QuantisedWeight, kind: torch.dtype) -> CodedTiles:
    """A weight packed some outputs at a time, in large pages: temporaries take many times the bytes of codes."""
    data: Tensor | None = None
    for begin in range(0, weight.shape[0], _ROWS):
        which_O = torch.arange(begin, min(begin + _ROWS, weight.shape[0]))
        part = coded_tiles(weight.rows(which_O), kind)
        if data is None:
            data = empty_in_large_pages((-(-weight.shape[0] // 16), part.data.shape[1]), torch.uint8)
        data[begin // 16 : begin // 16 + len(part)] = part.data
    assert data is not None
    return part.like(data)


def in_own_memory(weight: QuantisedWeight) -> CodedTiles:
    """A weight packed, in large pages."""
    coded = coded_tiles(weight)
    return coded if weight.shape[0] > _ROWS else coded.like(in_large_pages(coded.data))


def can_join(weights: Sequence[QuantisedWeight]) -> bool:
    """Whether :func:`joined` can; unsigned codes of 8 bits are one of a kind, and so is an order of columns."""
    if any(not _same(each.order_K, weights[0].order_K) for each in weights):
        return False
    return are_alike(weights) or not any(each.bits == 8 and not each.signed for each in weights)


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Weights of the same inputs, one below the other; of different kinds, in one that can be each of them exactly."""
    if len(weights) == 1:
        return weights[0]
    stored = [each for each in weights if isinstance(each, StoredWeight)]
    if len(stored) == len(weights) and are_alike(stored):
        return StoredWeight(
            torch.cat([each.blocks_OR for each in stored]), stored[0].kind, stored[0].name, checked=True
        )
    rounded = [each for each in weights if isinstance(each, RoundedWeight)]
    if len(rounded) == len(weights) and are_alike(rounded):
        return RoundedWeight.joined(rounded)
    weights = [each.decoded() for each in weights]
    if not are_alike(weights):
        group = min(each.group for each in weights)
        minimum = any(each.minimum_OG is not None for each in weights)
        weights = [_wider(each, group, minimum) for each in weights]
    first = weights[0]
    minimums = [each.minimum_OG for each in weights if each.minimum_OG is not None]
    return QuantisedWeight(
        torch.cat([each.codes_OK for each in weights]),
        torch.cat([each.scale_OG for each in weights]),
        torch.cat(minimums) if minimums else None,
        first.bits,
        first.order_K,
        first.name,
    )


def _same(order_K: Tensor | None, other_K: Tensor | None) -> bool:
    return order_K is other_K or (order_K is not None and other_K is not None and torch.equal(order_K, other_K))


def are_alike(weights: Sequence[QuantisedWeight]) -> bool:
    """Whether weights have codes, groups, scales and an order of columns of one kind."""
    first = weights[0]
    return all(
        _kind(each) == _kind(first) and each.group == first.group and _same(each.order_K, first.order_K)
        for each in weights
    )


def _kind(weight: QuantisedWeight) -> tuple[object, ...]:
    """Of its codes and parameters."""
    if isinstance(weight, StoredWeight):
        return (weight.kind.name,)
    return weight.bits, weight.signed, weight.minimum


def _wider(weight: QuantisedWeight, group: int, minimum: bool) -> QuantisedWeight:
    """The same weight in signed codes of 8 bits, in smaller groups, and with minimums if asked for."""
    codes_OK, scale_OG, minimum_OG = weight.codes_OK, weight.scale_OG, weight.minimum_OG
    repeats = weight.group // group
    scale_OG = scale_OG.repeat_interleave(repeats, dim=1)
    if minimum_OG is not None:
        minimum_OG = minimum_OG.repeat_interleave(repeats, dim=1)
    elif minimum:
        minimum_OG = torch.zeros_like(scale_OG)
    return QuantisedWeight(codes_OK.to(torch.int8), scale_OG, minimum_OG, 8, weight.order_K, weight.name)


def _padded(values: Tensor, tiles: int) -> Tensor:
    missing = tiles * 16 - len(values)
    return torch.cat([values, values.new_zeros(missing, values.shape[1])]) if missing else values


def _lines(count: int) -> int:
    return -(-count // _LINE) * _LINE
