"""Quantised weights that are decoded or rounded where they are read, and not kept: layers are packed one by one.

Decoded, a weight of a GGUF file takes a byte a code and four a scale: twice the file or more. The native decoder packs
blocks of 256 elements as they are (native/superblocks.py), and decodes others by parts.

Letters: O outputs, K inputs, R bytes of a row, B blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight, ranges, rounded, rounding_parameters

TABLES = {  # by the names that native code has for them
    "iq4": torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8),
    "fp4": torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8),
}
Parts = tuple[Tensor, Tensor, Tensor | None]  # codes [B, elements], scales and minimums [B, groups]
_ROWS = 4096  # outputs that are decoded at a time
_EXPONENT = 0x7C00  # of a float16; all bits set: an infinity or NaN


@dataclass(frozen=True, slots=True)
class BlockKind:
    """How a block of elements is stored.

    Attributes:
        name: ggml's.
        elements, bytes: of a block.
        bits: 8 or 4, of decoded codes.
        group: elements that share a scale.
        signed: whether decoded codes may be negative.
        halves: where a block's float16 numbers are: of its scales, then perhaps of its minimums.
        read: uint8 [B, bytes] to the decoded parts.
        table: of ``TABLES``: what stored codes of 4 bits stand for; decoded codes are those numbers.
    """

    name: str
    elements: int
    bytes: int
    bits: int
    group: int
    signed: bool
    halves: tuple[int, ...]
    read: Callable[[Tensor], Parts]
    table: str = "no_table"

    @property
    def packs_as_it_is(self) -> bool:
        """Whether native products read the blocks' codes and scales (native/superblocks.py, stored_blocks.py)."""
        return self.elements == 256 or self.table != "no_table"

    @property
    def scale_bytes(self) -> int:
        """Of a packed group's numbers, in a block of 32 elements; powers of two are kept in float32."""
        return len(self.halves) * torch.float16.itemsize or torch.float32.itemsize

    @property
    def minimum(self) -> bool:
        """Whether there are minimums."""
        return len(self.halves) == 2

    def packed_bytes(self, elements: int) -> int:
        """Of so many elements, once they are packed."""
        if self.elements == 256:
            return elements // self.elements * self.bytes
        return elements * (4 if self.packs_as_it_is else self.bits) // 8 + elements // self.group * self.scale_bytes


class LazyWeight(QuantisedWeight):
    """A quantised weight that makes its codes, scales and minimums at each look."""

    __slots__ = ()

    @abstractmethod
    def decoded(self) -> QuantisedWeight:
        """The same weight with its codes and scales in memory."""

    def for_modules(self) -> QuantisedWeight:
        """See :class:`QuantisedWeight`."""
        return self.decoded()

    @property
    def codes_OK(self) -> Tensor:
        """See :class:`QuantisedWeight`."""
        return self.decoded().codes_OK

    @property
    def scale_OG(self) -> Tensor:
        """See :class:`QuantisedWeight`."""
        return self.decoded().scale_OG

    @property
    def minimum_OG(self) -> Tensor | None:
        """See :class:`QuantisedWeight`."""
        return self.decoded().minimum_OG


class StoredWeight(LazyWeight):
    """A quantised weight in the blocks of its file.

    Args:
        blocks_OR: uint8, possibly in a mapped file; R is a whole number of blocks.
        kind: of the blocks.
        name: of the tensor, for messages.
        checked: whether all scales and minimums are known to be finite.
    Raises:
        ModelError: a scale or a minimum is not finite.
    """

    __slots__ = ("blocks_OR", "kind")

    blocks_OR: Tensor
    kind: BlockKind

    def __init__(self, blocks_OR: Tensor, kind: BlockKind, name: str = "weight", *, checked: bool = False) -> None:
        given = {"blocks_OR": blocks_OR, "kind": kind, "name": name, "bits": kind.bits, "order_K": None}
        for field, value in given.items():
            object.__setattr__(self, field, value)
        if checked:
            return
        for what, begin in zip(("scales", "minimums"), kind.halves, strict=False):
            # every kind's blocks and their parts are whole pairs of bytes, so the numbers are seen where they stand
            bits = self._blocks().view(torch.int16)[:, begin // 2]
            if bool(((bits & _EXPONENT) == _EXPONENT).any()):
                raise ModelError(f"the quantised tensor '{name}' has {what} that are not finite")

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredWeight, (self.blocks_OR, self.kind, self.name)

    def _blocks(self) -> Tensor:
        """uint8 [B, bytes]"""
        return self.blocks_OR.reshape(-1, self.kind.bytes)

    def decoded(self) -> QuantisedWeight:
        """The same weight, decoded."""
        outputs, inputs = self.shape
        codes, scale, minimum = self.kind.read(self._blocks())
        return QuantisedWeight(
            codes.view(outputs, inputs),
            scale.view(outputs, -1),
            None if minimum is None else minimum.view(outputs, -1),
            self.kind.bits,
            name=self.name,
        )

    def for_modules(self) -> QuantisedWeight:
        """See :class:`QuantisedWeight`."""
        return self if self.kind.packs_as_it_is else self.decoded()

    @property
    def source(self) -> Tensor:
        """See :class:`QuantisedWeight`."""
        return self.blocks_OR

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.kind.signed

    @property
    def minimum(self) -> bool:
        """Whether there are minimums."""
        return self.kind.minimum

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        outputs, row_bytes = self.blocks_OR.shape
        return outputs, row_bytes // self.kind.bytes * self.kind.elements

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.blocks_OR.device

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.kind.group

    @property
    def kept_in(self) -> torch.dtype:
        """What would hold all decoded scales and minimums exactly."""
        return self.decoded().kept_in if self.kind.packs_as_it_is else torch.float16

    @property
    def num_bytes(self) -> int:
        """Of the blocks; of a kind that is packed in another form, of that one."""
        outputs, inputs = self.shape
        return self.kind.packed_bytes(outputs * inputs)

    def dense(self) -> Tensor:
        """The weight that this is, float32 [O, K]; some outputs at a time."""
        dense_OK = torch.empty(self.shape, device=self.device)
        for rows, blocks in zip(dense_OK.split(_ROWS), self.blocks_OR.split(_ROWS), strict=True):
            rows.copy_(self._of(blocks).decoded().dense())
        return dense_OK

    def split(self, outputs: Sequence[int]) -> list[QuantisedWeight]:
        """In parts of so many outputs, one below the other."""
        return [self._of(each) for each in self.blocks_OR.split(list(outputs))]

    def rows(self, which_O: Tensor) -> QuantisedWeight:
        """Some outputs, int64, in this order."""
        return self._of(self.blocks_OR[which_O])

    def to(self, device: torch.device) -> QuantisedWeight:
        """The same weight on another device."""
        return self._of(self.blocks_OR.to(device)).for_modules()

    def _of(self, blocks_OR: Tensor) -> StoredWeight:
        return StoredWeight(blocks_OR, self.kind, self.name, checked=True)


class RoundedWeight(LazyWeight):
    """A dense weight, possibly in a mapped file, that is rounded to 8 or 4 bits.

    Args:
        dense_OK: floating.
        bits: 8 or 4.
        group: elements that share a scale; a row is whole groups.
        name: of the tensor, for messages.
    """

    __slots__ = ("_parameters", "dense_OK", "group")

    dense_OK: Tensor
    group: int
    _parameters: list[tuple[Tensor, Tensor | None]]

    def __init__(self, dense_OK: Tensor, bits: int, group: int, name: str) -> None:
        given = {"dense_OK": dense_OK, "bits": bits, "name": name, "order_K": None}
        for field, value in {**given, "group": group, "_parameters": []}.items():
            object.__setattr__(self, field, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return RoundedWeight, (self.dense_OK, self.bits, self.group, self.name)

    def parameters(self, find: Callable[[Tensor, int], tuple[Tensor, Tensor]] = ranges) -> tuple[Tensor, Tensor | None]:
        """Scales and, of 4 bits, minimums; found once, because all rows decide together on the type that keeps them.

        Args:
            find: the function that finds the ranges of groups.
        Raises:
            ModelError: the weight is not finite.
        """
        if not self._parameters:
            found = rounding_parameters(*find(self.dense_OK, self.group), self.bits, self.name)
            self._parameters.append(found)
        return self._parameters[0]

    def decoded(self) -> QuantisedWeight:
        """The same weight, rounded."""
        return rounded(self.dense_OK, self.bits, self.group, name=self.name, parameters=self.parameters())

    @classmethod
    def joined(cls, weights: Sequence[RoundedWeight]) -> RoundedWeight:
        """Weights that are rounded alike, one below the other, with the scales that each has by itself."""
        whole = cls(torch.cat([each.dense_OK for each in weights]), weights[0].bits, weights[0].group, weights[0].name)
        scales, minimums = zip(*(each.parameters() for each in weights), strict=True)
        whole._parameters.append((torch.cat(scales), torch.cat(minimums) if whole.minimum else None))
        return whole

    def split(self, outputs: Sequence[int]) -> list[QuantisedWeight]:
        """In parts of so many outputs, one below the other, with the scales that they have among all."""
        parts = [RoundedWeight(each, self.bits, self.group, self.name) for each in self.dense_OK.split(list(outputs))]
        found = [None if each is None else each.split(list(outputs)) for each in self.parameters()]
        for number, part in enumerate(parts):
            scale_OG, minimum_OG = (None if each is None else each[number] for each in found)
            assert scale_OG is not None
            part._parameters.append((scale_OG, minimum_OG))
        return list(parts)

    def rows(self, which_O: Tensor) -> QuantisedWeight:
        """Some outputs, int64, in this order, with the scales that they have among all."""
        scale_OG, minimum_OG = self.parameters()
        some = scale_OG[which_O], None if minimum_OG is None else minimum_OG[which_O]
        return rounded(self.dense_OK[which_O], self.bits, self.group, name=self.name, parameters=some)

    @property
    def kept_in(self) -> torch.dtype:
        """See :class:`QuantisedWeight`."""
        kept = [each for each in self.parameters() if each is not None]
        return torch.float16 if all(torch.equal(each.half().float(), each) for each in kept) else torch.float32

    @property
    def source(self) -> Tensor:
        """See :class:`QuantisedWeight`."""
        return self.dense_OK

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.bits == 8

    @property
    def minimum(self) -> bool:
        """Whether there are minimums."""
        return self.bits == 4

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        outputs, inputs = self.dense_OK.shape
        return outputs, inputs

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.dense_OK.device

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and minimums, if float16 holds these."""
        numbers = self.dense_OK.numel() // self.group * (1 + self.minimum)
        return self.dense_OK.numel() * self.bits // 8 + numbers * torch.float16.itemsize


def hold(model: nn.Module) -> None:
    """Let modules keep their weights decoded, unless native products read them as they are.

    Args:
        model: its modules compute more than once.
    """
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.quantised = module.quantised.for_modules()
        elif isinstance(module, QuantisedExperts):
            module.weights = [(gate_up.for_modules(), down.for_modules()) for gate_up, down in module.weights]
