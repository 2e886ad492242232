"""Random weights in the blocks of a GGUF file."""

from __future__ import annotations

import torch

from foretoken.forward.stored_weight import StoredWeight
from foretoken.models.gguf.blocks import kind_named


def random_stored(name: str, outputs: int, inputs: int, *, seed: int = 0, size: float = 1.0) -> StoredWeight:
    """Every bit random, but for the float16 numbers, which are normal ones of this size.

    Args:
        name: of the kind, as ggml has it.
    """
    kind = kind_named(name)
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // kind.elements, kind.bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for begin in kind.halves:
        halves = (size * torch.randn(shape[:2], generator=generator)).half()
        blocks[..., begin : begin + 2] = halves[..., None].view(torch.uint8)
    return StoredWeight(blocks.flatten(1), kind)
