"""What the machine computes fastest: the dtype of matrix products, and numbers too small to count.

Half of the processors that know bfloat16 multiply it at half the speed of float32 or less (Emerald Rapids without its
matrix unit: 75 against 150 GFLOP/s a core), others at four times that speed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from foretoken.models.processor import bfloat16_speed

_WORTH = 1.1  # bfloat16 must be so many times faster: it costs precision, and casts


def products(device: torch.device) -> AbstractContextManager[object]:
    """Within this context, matrix products are computed in the dtype that is fastest on the device."""
    if product_dtype(device.type) == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def product_dtype(kind: str) -> torch.dtype:
    """bfloat16 or float32: the faster one on a CPU, as measured here; bfloat16 on every other kind of device."""
    fast = kind != "cpu" or bfloat16_speed() > _WORTH
    return torch.bfloat16 if fast else torch.float32


@contextmanager
def tiny_numbers_ignored() -> Iterator[None]:
    """Have a CPU take numbers below 1e-38 for zero, in this thread and those that it starts meanwhile.

    The attention of a trained model is full of such probabilities, and Intel's processors compute with each of them a
    hundred times more slowly: a step of the base recipe takes 1.3 times as long with them.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
