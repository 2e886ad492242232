"""The Triton kernels that a device has, and the arguments of the attention kernel (block_attention.py) for a segment.

Letters: R rows of a segment, H query heads, G key/value heads, L columns, D key width.
"""

import importlib
import importlib.util
import logging
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foretoken.forward.batch import Segment
from foretoken.forward.switch import native_wanted

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTH = 256  # of keys and values, at most

log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def kernel(device: str, name: str = "block_attention") -> Any:
    """A kernel's module for this type of device, or None; found out once, and Triton imported only then."""
    if not native_wanted():
        return None
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if importlib.util.find_spec("triton") is None:
        log.info("triton is not installed: %s takes a slower way on this device; install triton for speed", name)
        return None
    return importlib.import_module(f"foretoken.forward.kernels.{name}")


def fits(size: int, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor) -> bool:
    """Whether the kernel is made for blocks of this size and tensors like these."""
    return (
        size >= 16
        and size & (size - 1) == 0
        and q_HRD.dtype in _DTYPES
        and q_HRD.dtype == k_GLD.dtype == v_GLD.dtype
        and max(q_HRD.shape[-1], v_GLD.shape[-1]) <= _WIDTH
    )


def seen(segment: Segment, device: torch.device) -> Tensor:
    """int8 [R, tail + R]: 1 where a row sees a row after the prefix."""
    if segment.seen is not None:
        return segment.seen.to(device, torch.int8)
    return torch.ones(segment.num_rows, segment.tail + segment.num_rows, dtype=torch.int8, device=device).tril_(
        segment.tail
    )
