"""How fast this machine's CPU multiplies in bfloat16: four times as fast as in float32, half as fast, or hardly at all.

No table of processors would stay right, so both are timed, once, for some 20 milliseconds.
"""

import time
from functools import cache

import torch

_ROWS, _COLUMNS = 1024, 512
_ROUNDS = 5


@cache
def bfloat16_speed() -> float:
    """Of matrix products, over float32's."""
    wide = torch.randn(_ROWS, _COLUMNS), torch.randn(_COLUMNS, _COLUMNS)
    narrow = wide[0].bfloat16(), wide[1].bfloat16()
    _seconds(*wide), _seconds(*narrow)  # the first call of each prepares
    float32, bfloat16 = zip(*((_seconds(*wide), _seconds(*narrow)) for _ in range(_ROUNDS)), strict=True)
    return min(float32) / min(bfloat16)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - started
