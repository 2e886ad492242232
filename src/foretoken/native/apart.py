"""Quantised layers that are packed one by one, where a model is computed by the library's own modules.

A native product has the bits of models/quantised/weight.py, so nothing changes but the time that it takes: the general
path, which a model that the native decoder does not fit is left to, spends it on attention and norms then.
"""

import ctypes
from functools import partial

import torch
from torch import Tensor, nn

from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight
from foretoken.native import build
from foretoken.native.packing import TiledLinear, packed_of


def packed_layer(weight: QuantisedWeight, bias: Tensor | None, library: ctypes.CDLL) -> nn.Module:
    """A layer over a quantised weight, with native products where its rows are whole vectors."""
    if weight.shape[1] % 16:
        return QuantisedLinear(weight, bias)
    return TiledLinear(packed_of([weight], torch.float32, library), weight.shape[0], bias, library)


def pack_quantised(model: nn.Module) -> int:
    """Replace every quantised layer below ``model``, experts included, where there is a compiled decoder.

    Args:
        model: on the CPU, computing in float32 or bfloat16.
    Returns:
        how many were replaced.
    """
    library = build.library()
    if library is None:
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedLinear):
                setattr(parent, name, packed_layer(child.quantised, child.bias, library).eval())
            elif isinstance(child, QuantisedExperts):
                child.pack(partial(packed_layer, bias=None, library=library))
            else:
                continue
            count += 1
    return count
