"""Weights in the order in which the native products read them, and ``nn.Linear`` over such weights.

    [O, K]  ──►  [O / 16, K / unit, 16, unit]       a unit is 32 bits: two bfloat16 or one float32

Letters: T rows, K inner dimension, O outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from foretoken.models.fused import team
from foretoken.models.fused.structs import Linear

UNITS = {torch.float32: 1, torch.bfloat16: 2}


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


class TiledLinear(nn.Module):
    """``nn.Linear`` over weights that the fused decoder has packed: the library's layers keep working.

    Args:
        packed: [tiles, K / unit, 16, unit], possibly every other tile of a larger pack.
        out_features: outputs; the last tile may be padded.
        bias: of the layer that this stands for, or None.
        library: compiled decoder.c.
    """

    def __init__(self, packed: Tensor, out_features: int, bias: Tensor | None, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        self._packed = packed
        self.own_bias = bias
        self._bias = None if bias is None else _padded(bias, 16 * packed.shape[0])
        self.in_features, self.out_features = packed.shape[1] * packed.shape[3], out_features

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, [O, K]."""
        return untiled(self._packed, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., O]

        Raises:
            ValueError: another width, or another dtype than the weights'.
        """
        packed = self._packed
        if x.shape[-1] != self.in_features or x.dtype != packed.dtype or x.device != packed.device:
            raise ValueError(
                f"a product over packed weights takes [..., {self.in_features}] of {packed.dtype} on {packed.device}, "
                f"not {list(x.shape)} of {x.dtype} on {x.device}"
            )
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(flat.shape[0], packed.shape[0] * 16)
        own = team.current()
        call = Linear(
            bf16=int(packed.dtype == torch.bfloat16),
            tile_stride=packed.stride(0) // packed.shape[3],
            tiles=packed.shape[0],
            units=packed.shape[1],
            rows=flat.shape[0],
            threads=own.threads,
            w=packed.data_ptr(),
            x=flat.data_ptr(),
            out=out.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )
        handle = own.handle(self._library)
        if self._library.foretoken_linear(handle.address, ctypes.addressof(call)):
            raise MemoryError("there is no memory for a product over packed weights")
        return out[:, : self.out_features].to(x.dtype).view(*x.shape[:-1], self.out_features)


def _padded(bias: Tensor, outputs: int) -> Tensor:
    kept = torch.zeros(outputs)
    kept[: len(bias)] = bias.detach().to(torch.float32)
    return kept
