"""A quantised weight in the blocks of its file: codes and scales are decoded where they are read, and not kept.

Decoded, a weight takes a byte a code and four a scale: twice the file or more. The native decoder packs the blocks as
they are (native/superblocks.py).

Letters: O outputs, K inputs, R bytes of a row, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes [B, elements], scales and minimums [B, groups]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """How a block of elements is stored.

    Attributes:
        name: ggml's.
        elements, bytes: of a block.
        bits: 8 or 4, of decoded codes.
        group: elements that share a scale.
        halves: where a block's float16 numbers are: of its scales, then perhaps of its minimums.
        read: uint8 [B, bytes] to the decoded parts.
    """

    name: str
    elements: int
    bytes: int
    bits: int
    group: int
    halves: tuple[int, ...]
    read: Callable[[Tensor], Parts]


class StoredWeight(QuantisedWeight):
    """A quantised weight that decodes its codes, scales and minimums at each look.

    Args:
        blocks_OR: uint8, possibly in a mapped file; R is a whole number of blocks.
        kind: of the blocks.
        name: of the tensor, for messages.
    Raises:
        ModelError: a scale or a minimum is not finite.
    """

    __slots__ = ("blocks_OR", "kind")

    blocks_OR: Tensor
    kind: BlockKind

    def __init__(self, blocks_OR: Tensor, kind: BlockKind, name: str = "weight") -> None:
        given = {"blocks_OR": blocks_OR, "kind": kind, "name": name, "bits": kind.bits, "order_K": None}
        for field, value in given.items():
            object.__setattr__(self, field, value)
        for what, begin in zip(("scales", "minimums"), kind.halves, strict=False):
            halves = self._blocks()[:, begin : begin + 2].contiguous().view(torch.float16)
            if not halves.isfinite().all():
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
        return self.decoded().kept_in

    @property
    def num_bytes(self) -> int:
        """Of the blocks."""
        return self.blocks_OR.numel()

    def dense(self) -> Tensor:
        """The weight that this is, float32 [O, K]."""
        return self.decoded().dense()

    def split(self, outputs: Sequence[int]) -> list[QuantisedWeight]:
        """In parts of so many outputs, one below the other."""
        return [self._of(each) for each in self.blocks_OR.split(list(outputs))]

    def rows(self, which_O: Tensor) -> QuantisedWeight:
        """Some outputs, int64, in this order."""
        return self._of(self.blocks_OR[which_O])

    def to(self, device: torch.device) -> QuantisedWeight:
        """The same weight on another device."""
        return self._of(self.blocks_OR.to(device))

    def _of(self, blocks_OR: Tensor) -> StoredWeight:
        return StoredWeight(blocks_OR, self.kind, self.name)
