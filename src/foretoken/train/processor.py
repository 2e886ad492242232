"""What the machine computes fastest: the dtype of matrix products, and numbers too small to count.

Half of the processors that know bfloat16 multiply it at half the speed of float32 or less (Emerald Rapids without its
matrix unit: 75 against 150 GFLOP/s a core), others at four times that speed. No table of processors would stay right,
so both are timed, once, for some 20 milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

_WORTH = 1.1  # bfloat16 must be so many times faster: it costs precision, and casts
_ROWS, _COLUMNS = 1024, 512
_ROUNDS = 5


def products(device: torch.device) -> AbstractContextManager[object]:
    """Within this context, matrix products are computed in the dtype that is fastest on the device."""
    if product_dtype(device.type) == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@cache
def product_dtype(kind: str) -> torch.dtype:
    """bfloat16 or float32: the faster one on a CPU, as measured here; bfloat16 on every other kind of device."""
    if kind != "cpu":
        return torch.bfloat16
    wide = torch.randn(_ROWS, _COLUMNS), torch.randn(_COLUMNS, _COLUMNS)
    narrow = wide[0].bfloat16(), wide[1].bfloat16()
    _seconds(*wide), _seconds(*narrow)  # the first call of each prepares
    float32, bfloat16 = zip(*((_seconds(*wide), _seconds(*narrow)) for _ in range(_ROUNDS)), strict=True)
    return torch.bfloat16 if min(bfloat16) * _WORTH < min(float32) else torch.float32


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - started


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
