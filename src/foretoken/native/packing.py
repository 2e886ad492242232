"""Weights in the order in which the native products read them, and ``nn.Linear`` over such weights.

    [O, K]  ──►  [O / 16, K / unit, 16, unit]       a unit is 32 bits: two bfloat16 or one float32

Quantised weights are packed in quantised.py. Letters: T rows, K inner dimension, O outputs.
"""

import ctypes
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from foretoken.core.pages import empty_in_large_pages
from foretoken.core.threads import threads_for
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight
from foretoken.forward.stored_weight import RoundedWeight, StoredWeight
from foretoken.native import team
from foretoken.native.dense_weights import can_round, find_parameters, tile_bytes, write_tiles
from foretoken.native.kept_tiles import kept_or_made
from foretoken.native.quantised import CodedTiles, are_alike, joined
from foretoken.native.structs import Linear, Matrix
from foretoken.native.superblocks import MixedTiles, packed_codes, together
from foretoken.native.tiles import described_dense, tile_memory

UNITS = {torch.float32: 1, torch.bfloat16: 2}
Tiles = Tensor | CodedTiles  # a packed weight, [tiles, K / unit, 16, unit] or quantised; slices are over tiles


def tiled(weight_OK: Tensor) -> Tensor:
    """[O, K] -> [O / 16, K / unit, 16, unit]; O is padded with zeros to a whole tile."""
    unit = UNITS[weight_OK.dtype]
    outputs, inner = weight_OK.shape
    padded = -(-outputs // 16) * 16
    if padded != outputs:
        weight_OK = torch.cat([weight_OK, weight_OK.new_zeros(padded - outputs, inner)])
    return weight_OK.view(padded // 16, 16, inner // unit, unit).permute(0, 2, 1, 3)


def untiled(packed: Tensor, outputs: int) -> Tensor:
    """What :func:`tiled` was given, a copy."""
    tiles, units, _, unit = packed.shape
    return packed.permute(0, 2, 1, 3).reshape(tiles * 16, units * unit)[:outputs].contiguous()


def packed_of(weights: list[Tensor | QuantisedWeight], dtype: torch.dtype, library: ctypes.CDLL) -> Tiles:
    """Several weights of the same inputs, one below the other, packed in one form; all dense, or all quantised.

    Args:
        weights: the outputs of all but the last are multiples of 16.
        dtype: of dense ones.
        library: compiled decoder.c.
    """
    if len(weights) == 1 and isinstance(weights[0], RoundedWeight):
        return kept_or_made([weights[0].name], partial(packed_codes, weights[0], library))
    if isinstance(weights[0], QuantisedWeight):
        return packed_codes(joined(cast("list[QuantisedWeight]", weights)), library)
    return _dense([each.detach().to(dtype) for each in weights if isinstance(each, Tensor)], library)


def packed_apart(
    weights: list[Tensor | QuantisedWeight], dtype: torch.dtype, library: ctypes.CDLL
) -> Tiles | MixedTiles:
    """As :func:`packed_of`, but quantised weights of several kinds are not widened to one; dense ones may follow."""
    quantised = [each for each in weights if isinstance(each, QuantisedWeight)]
    if not quantised:
        return packed_of(weights, dtype, library)
    packed = together(quantised, library)
    if len(quantised) == len(weights):
        return packed
    runs = packed.runs if isinstance(packed, MixedTiles) else [packed]
    return MixedTiles([*runs, packed_of(weights[len(quantised) :], dtype, library)])


def alternating(first: CodedTiles, second: CodedTiles) -> CodedTiles:
    """Two quantised packed weights of one form and size, a tile of the one and a tile of the other in turn."""
    whole = tile_memory(16 * (len(first) + len(second)), first.data.shape[1])
    for number, each in enumerate((first, second)):
        whole[number::2].copy_(each.data)
    return first.like(whole)


def packed_in_turn(
    first: Tensor | QuantisedWeight, second: Tensor | QuantisedWeight, dtype: torch.dtype, library: ctypes.CDLL
) -> Tiles:
    """Two weights of the same inputs and outputs, a tile of the one and a tile of the other in turn.

    Args:
        first, second: both dense, or both quantised; their outputs are multiples of 16.
        dtype: of dense ones.
        library: compiled decoder.c.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _dense([each.detach().to(dtype) for each in (first, second)], library, in_turn=True)
    quantised = cast("list[QuantisedWeight]", [first, second])
    if not all(isinstance(each, RoundedWeight) for each in quantised):
        return _coded_in_turn(quantised, library)
    return kept_or_made([each.name for each in quantised], partial(_coded_in_turn, quantised, library))


def _coded_in_turn(quantised: list[QuantisedWeight], library: ctypes.CDLL) -> CodedTiles:
    if (size := _shared_tile_bytes(quantised, library)) is not None:
        tiles = tile_memory(2 * quantised[0].shape[0], size)
        begun = [packed_codes(each, library, into=tiles[number::2]) for number, each in enumerate(quantised)]
        return begun[0].like(tiles)
    apart = [packed_codes(each, library) for each in quantised]
    if apart[0].form != apart[1].form:
        whole = packed_codes(joined(quantised), library)
        apart = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return alternating(*apart)


def _shared_tile_bytes(weights: list[QuantisedWeight], library: ctypes.CDLL) -> int | None:
    """Bytes of a tile of each; None where they are not written to their place, or would be of several forms."""
    if are_alike(weights) and isinstance(weights[0], StoredWeight):
        return packed_codes(weights[0].rows(torch.arange(16)), library).data.shape[1]
    if not (are_alike(weights) and all(isinstance(each, RoundedWeight) and can_round(each) for each in weights)):
        return None
    rounded = cast("list[RoundedWeight]", weights)
    for each in rounded:
        find_parameters(each, library)
    return tile_bytes(rounded[0]) if rounded[0].kept_in == rounded[1].kept_in else None


def _dense(weights: list[Tensor], library: ctypes.CDLL, *, in_turn: bool = False) -> Tensor:
    """Dense weights in tiles, one below the other or a tile of each in turn, in large pages."""
    unit = UNITS[weights[0].dtype]
    tiles = [-(-len(each) // 16) for each in weights]
    inner = weights[0].shape[1]
    whole, begin = empty_in_large_pages((sum(tiles), inner // unit, 16, unit), weights[0].dtype), 0
    for number, (each, count) in enumerate(zip(weights, tiles, strict=True)):
        place = whole[number :: len(weights)] if in_turn else whole[begin : begin + count]
        write_tiles(each.contiguous(), place, library)
        begin += count
    return whole


def described(packed: Tiles | MixedTiles) -> Matrix:
    """What native code is told of a packed weight."""
    return packed.described() if isinstance(packed, CodedTiles | MixedTiles) else described_dense(packed)


def form_of(packed: Tiles) -> tuple[object, ...]:
    """What two packed weights must have in common for one to stand in the other's place."""
    return packed.form if isinstance(packed, CodedTiles) else (*packed.shape[1:], packed.dtype)


def parts_of(packed: Tiles) -> list[Tensor]:
    """Views [tiles, X, 16, Y] of all that belongs to an output, which is element i of the third dimension."""
    return packed.parts() if isinstance(packed, CodedTiles) else [packed]


class TiledLinear(nn.Module):
    """``nn.Linear`` over weights that the native decoder has packed: the library's layers keep working.

    Args:
        packed: possibly every other tile of a larger pack.
        out_features: outputs; the last tile may be padded.
        bias: of the layer that this stands for, or None.
        library: compiled decoder.c.
        order_O: output ``order_O[i]`` of the layer is packed in place i; None: as they stand.
    """

    def __init__(
        self, packed: Tiles, out_features: int, bias: Tensor | None, library: ctypes.CDLL, order_O: Tensor | None = None
    ) -> None:
        super().__init__()
        self._places_O = None if order_O is None else order_O.argsort()
        self._library = library
        self._packed = packed
        self.own_bias = bias
        self._bias = None
        if bias is not None:
            self._bias = _padded(bias if order_O is None else bias[order_O], 16 * len(packed))
        self.out_features = out_features
        self._dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
        if isinstance(packed, CodedTiles):
            self.in_features = packed.inputs
        else:
            self.in_features, self._dtypes = packed.shape[1] * packed.shape[3], (packed.dtype,)

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, [O, K]."""
        if isinstance(self._packed, CodedTiles):
            return self._quantised(self._packed).dense()
        dense_OK = untiled(self._packed, self.out_features)
        return dense_OK if self._places_O is None else dense_OK[self._places_O]

    def _quantised(self, packed: CodedTiles) -> QuantisedWeight:
        weight = packed.weight(self.out_features)
        return weight if self._places_O is None else weight.rows(self._places_O)

    def unpacked(self) -> nn.Module:
        """The layer that there was, with the same weight bit for bit."""
        if isinstance(self._packed, CodedTiles):
            return QuantisedLinear(self._quantised(self._packed), self.own_bias)
        return _plain(self.weight, self.own_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., O]

        Raises:
            ValueError: another width, or another dtype than the weights'.
        """
        packed = self._packed
        if x.shape[-1] != self.in_features or x.dtype not in self._dtypes or x.device != packed.device:
            raise ValueError(
                f"a product over packed weights takes [..., {self.in_features}] of {self._dtypes} on {packed.device}, "
                f"not {list(x.shape)} of {x.dtype} on {x.device}"
            )
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(flat.shape[0], len(packed) * 16)
        own = team.current()
        call = Linear(
            w=described(packed),
            bf16=int(x.dtype == torch.bfloat16),
            tiles=len(packed),
            units=self.in_features // UNITS[x.dtype],
            rows=flat.shape[0],
            threads=own.threads,
            x=flat.data_ptr(),
            out=out.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )
        handle = own.handle(self._library)
        if self._library.foretoken_linear(handle.address, ctypes.addressof(call)):
            raise MemoryError("there is no memory for a product over packed weights")
        with threads_for(out.numel()):
            out = out[:, : self.out_features] if self._places_O is None else out[:, self._places_O]
            return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class TiledPair(nn.Module):
    """A linear layer whose outputs are those of two packed weights, the second's after the first's.

    Args:
        first, second: of the same inputs, both with biases or both without.
    """

    def __init__(self, first: TiledLinear, second: TiledLinear) -> None:
        super().__init__()
        self._pair = (first, second)  # not registered: the halves are no layers of the model
        self.in_features, self.out_features = first.in_features, first.out_features + second.out_features
        biases = [each.own_bias for each in self._pair if each.own_bias is not None]
        self.bias = torch.cat(biases) if biases else None

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, [O, K]."""
        return torch.cat([each.weight for each in self._pair])

    def unpacked(self) -> nn.Module:
        """The layer that there was, with the same weight bit for bit."""
        halves = [each.unpacked() for each in self._pair]
        weights = [each.quantised for each in halves if isinstance(each, QuantisedLinear)]
        if weights:
            return QuantisedLinear(joined(weights), self.bias)
        return _plain(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., O]; see :class:`TiledLinear`."""
        return torch.cat([each(x) for each in self._pair], dim=-1)


def _plain(weight_OK: Tensor, bias_O: Tensor | None) -> nn.Linear:
    outputs, inputs = weight_OK.shape
    plain = nn.Linear(inputs, outputs, bias=False, device="meta")
    plain.weight = nn.Parameter(weight_OK, requires_grad=False)
    if bias_O is not None:
        plain.bias = nn.Parameter(bias_O, requires_grad=False)
    return plain


def _padded(bias: Tensor, outputs: int) -> Tensor:
    kept = torch.zeros(outputs)
    kept[: len(bias)] = bias.detach().to(torch.float32)
    return kept
