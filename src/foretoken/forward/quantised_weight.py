"""Weights of 8 or 4 bits, what a product with them is, and ``nn.Linear`` over one.

    W[o, k] = scale[o, g] code[o, k] + minimum[o, g]            g = k // group
    x[t, k] ≈ step[t, s] a[t, k]                                s = k // 32, a: int8, step: the largest magnitude / 127

    y[t, o] = Σ_k W[o, k] step[t, s] a[t, k]  +  bias[o]

A cell c is the set of inputs with one step and one group. Its sums are integers, hence exact in any order:

    dot[c] = Σ_k∈c code[o, k] a[t, k]        alone[c] = Σ_k∈c a[t, k]

Sums over cells are float32, ascending, every product and every sum rounded by itself, a scale's term before a
minimum's. The shorter of group and step is summed over first:

    group <= 32    y = Σ_s step[s] · Σ_c∈s ( scale[g] · dot[c]  +  minimum[g] · alone[c] )
    group  > 32    y = Σ_g ( scale[g] · Σ_c∈g step[s] · dot[c]  +  minimum[g] · Σ_c∈g step[s] · alone[c] )

So a row's bits depend on that row only, and the native products (native/quantised.h) have the same bits as this
file. Steps of 32 inputs keep one large channel from coarsening a whole row (docs/quantised.md has the measurements).

Letters: T rows, K inner dimension, O outputs, G groups, S steps, C cells.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foretoken.core.errors import ModelError

BITS = (4, 8)
GROUPS = (16, 32, 64, 128)  # or a whole row
STEP = 32  # inputs of a row that share a step; the last ones of a row may be fewer
_CODES = {4: {torch.int8: (-8, 7), torch.uint8: (0, 15)}, 8: {torch.int8: (-128, 127), torch.uint8: (0, 255)}}
_ROWS = 4096  # outputs that are converted at a time: temporaries take many times the bytes of codes
_LEAST = 2.0**-100  # inputs of a step with a largest magnitude below this count as zeros


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """The weight of a linear layer: a code of some bits for each element, a scale and perhaps a minimum for each group.

    Attributes:
        codes_OK: int8 (of 4 bits: -8 to 7) or uint8 (0 to 15), one code a byte.
        scale_OG: float32; G is K over the group.
        minimum_OG: float32, or None for zeros.
        bits: 8 or 4; the codes must fit.
        order_K: int64, a permutation: column j of the codes belongs to input ``order_K[j]``; None: as they stand.
        name: of the tensor, for messages.
    Raises:
        ModelError: shapes or dtypes that do not fit each other, a group of another size than 16, 32, 64, 128 or a
            whole row, codes out of range, scales or minimums that are not finite.
    """

    codes_OK: Tensor
    scale_OG: Tensor
    minimum_OG: Tensor | None
    bits: int
    order_K: Tensor | None = None
    name: str = "weight"

    def __post_init__(self) -> None:
        codes, scale = self.codes_OK, self.scale_OG
        if self.bits not in BITS:
            raise self._odd(f"has {self.bits} bits: 8 or 4")
        if codes.ndim != 2 or not codes.numel() or codes.dtype not in _CODES[self.bits]:
            raise self._odd(f"has codes {list(codes.shape)} of {codes.dtype}: [outputs, inputs] of int8 or uint8")
        outputs, inputs = codes.shape
        if scale.ndim != 2 or len(scale) != outputs or not scale.shape[1] or inputs % scale.shape[1]:
            raise self._odd(f"has scales {list(scale.shape)} for codes [{outputs}, {inputs}]: [outputs, groups]")
        if self.group != inputs and self.group not in GROUPS:
            raise self._odd(f"has groups of {self.group}: {', '.join(map(str, GROUPS))} or a whole row")
        for what, values in (("scales", scale), ("minimums", self.minimum_OG)):
            if values is None:
                continue
            if values.shape != scale.shape or values.dtype != torch.float32:
                raise self._odd(f"has {what} {list(values.shape)} of {values.dtype}: float32 {list(scale.shape)}")
            if not values.isfinite().all():
                raise self._odd(f"has {what} that are not finite")
        least, most = _CODES[self.bits][codes.dtype]
        low, high = torch.aminmax(codes)
        if low < least or high > most:
            raise self._odd(f"has codes from {int(low)} to {int(high)}: {least} to {most} in {self.bits} bits")
        if self.order_K is not None:
            order = self.order_K
            if order.shape != (inputs,) or not torch.equal(order.sort().values, torch.arange(inputs).to(order)):
                raise self._odd(f"has an order of columns that is no permutation of {inputs}")

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        outputs, inputs = self.codes_OK.shape
        return outputs, inputs

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes_OK.device

    def decoded(self) -> QuantisedWeight:
        """The same weight with its codes and scales in memory (see stored_weight.py)."""
        return self

    def for_modules(self) -> QuantisedWeight:
        """The same weight as :class:`QuantisedLinear` keeps it, if that computes with it more than once."""
        return self

    @property
    def source(self) -> Tensor | None:
        """What the weight is decoded or rounded from, perhaps in a mapped file; None: nothing."""
        return None

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.codes_OK.dtype == torch.int8

    @property
    def minimum(self) -> bool:
        """Whether there are minimums."""
        return self.minimum_OG is not None

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return int(self.codes_OK.shape[1] // self.scale_OG.shape[1])

    @property
    def kept_in(self) -> torch.dtype:
        """What holds all scales and minimums exactly: float16 if that does, else float32."""
        given = [self.scale_OG] if self.minimum_OG is None else [self.scale_OG, self.minimum_OG]
        return torch.float16 if all(torch.equal(each.half().float(), each) for each in given) else torch.float32

    @property
    def num_bytes(self) -> int:
        """Codes of ``bits`` bits, scales and minimums."""
        numbers = self.scale_OG.numel() * (1 if self.minimum_OG is None else 2)
        return self.codes_OK.numel() * self.bits // 8 + numbers * self.kept_in.itemsize

    def dense(self) -> Tensor:
        """The weight that this is, float32 [O, K], columns in the layer's order."""
        own, (outputs, inputs) = self.decoded(), self.shape
        values_OGk = own.codes_OK.view(outputs, -1, self.group) * own.scale_OG[..., None]
        if own.minimum_OG is not None:
            values_OGk = values_OGk + own.minimum_OG[..., None]
        values_OK = values_OGk.reshape(outputs, inputs)
        if self.order_K is None:
            return values_OK
        return torch.empty_like(values_OK).index_copy_(1, self.order_K, values_OK)

    def split(self, outputs: Sequence[int]) -> list[QuantisedWeight]:
        """In parts of so many outputs, one below the other."""
        own, sizes = self.decoded(), list(outputs)
        codes, scales = own.codes_OK.split(sizes), own.scale_OG.split(sizes)
        minimums = [None] * len(sizes) if own.minimum_OG is None else own.minimum_OG.split(sizes)
        return [
            QuantisedWeight(*each, self.bits, self.order_K, self.name)
            for each in zip(codes, scales, minimums, strict=True)
        ]

    def rows(self, which_O: Tensor) -> QuantisedWeight:
        """Some outputs, int64, in this order."""
        minimum_OG = None if self.minimum_OG is None else self.minimum_OG[which_O]
        codes_OK, scale_OG = self.codes_OK[which_O], self.scale_OG[which_O]
        return QuantisedWeight(codes_OK, scale_OG, minimum_OG, self.bits, self.order_K, self.name)

    def to(self, device: torch.device) -> QuantisedWeight:
        """The same weight on another device."""
        own = self.decoded()
        minimum, order = (None if each is None else each.to(device) for each in (own.minimum_OG, own.order_K))
        codes, scale = own.codes_OK.to(device), own.scale_OG.to(device)
        return QuantisedWeight(codes, scale, minimum, self.bits, order, self.name)

    def _odd(self, what: str) -> ModelError:
        return ModelError(f"the quantised tensor '{self.name}' {what}")


@torch.no_grad()
def rounded(
    weight_OK: Tensor,
    bits: int,
    group: int | None = None,
    *,
    name: str = "weight",
    parameters: tuple[Tensor, Tensor | None] | None = None,
) -> QuantisedWeight:
    """A dense weight in 8 or 4 bits, every element to the nearest code.

    Codes of 8 bits are symmetric, -127 to 127; those of 4 bits lie between a group's smallest and largest element.
    Scales and minimums are taken in float16 where that keeps ten bits of them, to save memory.

    Args:
        weight_OK: floating, finite.
        bits: 8 or 4.
        group: elements that share a scale; None: a whole row.
        parameters: scales and minimums of :func:`rounding_parameters`; None: they are found.
    Raises:
        ModelError: the weight is not finite, its rows are not whole groups, or see :class:`QuantisedWeight`.
    """
    outputs, inputs = weight_OK.shape
    size = inputs if group is None else group
    if inputs % size:
        raise ModelError(f"the tensor '{name}' has rows of {inputs} elements, which are no groups of {size}")
    scale_OG, minimum_OG = parameters or rounding_parameters(*ranges(weight_OK, size), bits, name)
    parts = [rows.reshape(len(rows), -1, size) for rows in weight_OK.detach().split(_ROWS)]
    codes_OK = torch.empty(outputs, inputs, dtype=torch.int8 if bits == 8 else torch.uint8)
    rows_of_parts = (each.split(_ROWS) for each in (codes_OK, scale_OG, scale_OG if minimum_OG is None else minimum_OG))
    for part_OGk, codes, scale, minimum in zip(parts, *rows_of_parts, strict=True):
        values_OGk = part_OGk.to(torch.float32)
        if bits == 4:
            values_OGk = values_OGk - minimum[..., None]
        found_OGk = (values_OGk / torch.where(scale == 0, 1.0, scale)[..., None]).round_()
        codes.copy_((found_OGk.clamp_(-127, 127) if bits == 8 else found_OGk.clamp_(0, 15)).flatten(1))
    return QuantisedWeight(codes_OK, scale_OG, minimum_OG, bits, name=name)


def ranges(weight_OK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each group, float32 [O, G]."""
    found = []
    for rows in weight_OK.detach().split(_ROWS):
        part_OGk = rows.unflatten(1, (-1, group)).to(torch.float32)
        found.append((part_OGk.amin(dim=-1), part_OGk.amax(dim=-1)))
    low, high = zip(*found, strict=True)
    return torch.cat(low), torch.cat(high)


def rounding_parameters(low_OG: Tensor, high_OG: Tensor, bits: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Scales, and of 4 bits minimums, of groups with these smallest and largest elements; see :func:`rounded`.

    Raises:
        ModelError: an element is not finite.
    """
    if not (low_OG.isfinite().all() and high_OG.isfinite().all()):
        raise ModelError(f"the tensor '{name}' holds values that are not finite: it cannot be rounded to {bits} bits")
    sizes_OG = torch.maximum(low_OG.abs(), high_OG.abs())
    minimum_OG = _short(low_OG, sizes_OG) if bits == 4 else None
    widest_OG = sizes_OG / 127 if minimum_OG is None else (high_OG - minimum_OG) / 15
    return _short(widest_OG, widest_OG), minimum_OG


def _short(values_OG: Tensor, sizes_OG: Tensor) -> Tensor:
    """What float16 makes of them, unless that moves one of them by more than a 1024th of its group's size."""
    short_OG = values_OG.half().float()
    return short_OG if bool(((short_OG - values_OG).abs() <= sizes_OG.abs() * 2.0**-10).all()) else values_OG


class Rows(NamedTuple):
    """Activations as a product takes them.

    Attributes:
        codes_TK: whole numbers from -127 to 127, float32.
        step_TS: float32; NaN where a value is not finite.
    """

    codes_TK: Tensor
    step_TS: Tensor


def rows_of(x_TK: Tensor) -> Rows:
    """Each 32 elements of a row in 8 bits: to the nearest of 255 steps of their largest magnitude, ties to even."""
    inputs = x_TK.shape[1]
    x_TSk = _in_parts(x_TK.to(torch.float32), STEP)
    largest_TS = x_TSk.abs().amax(dim=-1)
    whole_TS = largest_TS.isfinite()
    counts_TS = whole_TS & (largest_TS >= _LEAST)
    inverse_TS = torch.where(counts_TS, torch.full_like(largest_TS, 127.0) / largest_TS, 0.0)  # one rounding, not two
    codes_TSk = torch.where(counts_TS[..., None], x_TSk * inverse_TS[..., None], 0.0).round()
    step_TS = torch.where(counts_TS, largest_TS / 127.0, 0.0)
    return Rows(codes_TSk.flatten(1)[:, :inputs], torch.where(whole_TS, step_TS, torch.nan))


@torch.no_grad()
def product(rows: Rows, weight: QuantisedWeight) -> Tensor:
    """float32 [T, O]: the formula at the top of this file, without the bias; the rows are in the codes' order."""
    weight = weight.decoded()
    outputs, group = len(weight.codes_OK), weight.group
    cell = min(group, STEP)
    a_CTk = _in_parts(rows.codes_TK, cell).transpose(0, 1)
    w_COk = _in_parts(weight.codes_OK.to(torch.float32), cell).transpose(0, 1)
    dot_CTO = torch.bmm(a_CTk, w_COk.transpose(1, 2))  # whole numbers below 2^24
    alone_CT1 = a_CTk.sum(dim=-1, keepdim=True)
    step_ST1, scale_GO = rows.step_TS.T[..., None], weight.scale_OG.T
    minimum_GO = None if weight.minimum_OG is None else weight.minimum_OG.T
    y_TO = torch.zeros(len(rows.codes_TK), outputs, device=rows.codes_TK.device)
    inner = STEP // cell if group <= STEP else -(-group // STEP)  # cells of a step, or of a group that is larger
    for first in range(0, len(dot_CTO), inner):
        cells = range(first, min(first + inner, len(dot_CTO)))
        if group <= STEP:
            of_step_TO = torch.zeros_like(y_TO)
            for c in cells:
                of_step_TO += scale_GO[c] * dot_CTO[c]
                if minimum_GO is not None:
                    of_step_TO += minimum_GO[c] * alone_CT1[c]
            y_TO += of_step_TO * step_ST1[first // inner]
            continue
        g = first // inner
        y_TO += scale_GO[g] * _summed(step_ST1[c] * dot_CTO[c] for c in cells)
        if minimum_GO is not None:
            y_TO += minimum_GO[g] * _summed(step_ST1[c] * alone_CT1[c] for c in cells)
    return y_TO


def _in_parts(values_TK: Tensor, size: int) -> Tensor:
    """[T, K] -> [T, parts, size], the last one filled up with zeros."""
    missing = -values_TK.shape[1] % size
    return nn.functional.pad(values_TK, (0, missing)).unflatten(1, (-1, size))


def _summed(terms: Iterable[Tensor]) -> Tensor:
    """In ascending order, every sum rounded."""
    return functools.reduce(torch.add, terms)


class QuantisedLinear(nn.Module):
    """``nn.Linear`` over a quantised weight, for inference, on any device; exact but not fast.

    Args:
        weight: on the device where it will be used, or moved with the module.
        bias: of the layer that this stands for, or None; in the dtype that the model computes in.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.quantised = weight
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape

    @property
    def weight(self) -> Tensor:
        """[O, K], dense, made anew at each look: a few families read the weight of a router or its dtype."""
        return self.quantised.dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., O], in the dtype of ``x``."""
        weight = self.quantised
        flat_TK = x.reshape(-1, x.shape[-1])
        if weight.order_K is not None:
            flat_TK = flat_TK[:, weight.order_K]
        y_TO = product(rows_of(flat_TK), weight)
        if self.bias is not None:
            y_TO = y_TO + self.bias.to(torch.float32)
        return y_TO.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move with the model, whatever it is moved by; codes and scales keep their dtypes."""
        moved = super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.quantised.device)).device
        if device != self.quantised.device:
            self.quantised = self.quantised.to(device)
        if self.bias is not None:
            self.bias = self.bias.to(device)
        return moved

    def extra_repr(self) -> str:
        weight = self.quantised
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={weight.bits}, group={weight.group}"
        )
