"""Whether a projection is just its weight: only then may code compute with the weight instead of calling the module.

LoRA, quantised formats and hooks all leave a module that looks like ``nn.Linear`` and computes something else: a
subclass, a ``forward`` on the instance, a parameter of another type, another parameter next to the weight. Whatever is
not known to be plain is left to its module.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_DTYPES = (torch.float32, torch.bfloat16)
# where the classes live that the library builds its models from; remote code, adapters and quantisers live elsewhere
_LIBRARY = ("transformers.models.", "transformers.activations", "transformers.pytorch_utils", "torch.nn.modules.")


def why_not_plain(module: nn.Module | None, dtype: torch.dtype | None = None) -> str | None:
    """The reason why a module is not a product with a dense float32 or bfloat16 weight on the CPU; None if it is.

    Args:
        module: found in the place of a linear layer; may be None.
        dtype: of the model, which weight and bias must have, too; None: either of the two.
    """
    if type(module) is not nn.Linear:
        return f"is a {type(module).__name__}"
    found = own_ways(module)
    if found is not None:
        return found
    for name in (*module._parameters, *module._buffers, *module._modules):
        if name not in ("weight", "bias"):
            return f"has a '{name}' next to its weight"
    weight = module._parameters.get("weight")
    for part in (weight, module._parameters.get("bias")):
        if part is None and part is not weight:
            continue  # a layer without bias
        if type(part) is not nn.Parameter:
            return f"has a weight of type {type(part).__name__}"
        if part.layout is not torch.strided or part.dtype not in _DTYPES or part.device.type != "cpu":
            return f"has weights of {part.dtype} on {part.device}"
        if dtype is not None and part.dtype != dtype:
            return f"has weights of {part.dtype} in a model of {dtype}"
    return None


def why_not_its_weights(model: Any, known: Collection[nn.Module] = ()) -> str | None:
    """Which part of a model keeps it from being computed from its weights alone, and why; None if nothing does.

    Args:
        known: modules with a forward that this library replaced.
    """
    dtype = next(model.parameters()).dtype
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            why = why_not_plain(module, dtype)
        elif module in known:
            why = None
        elif not type(module).__module__.startswith(_LIBRARY):
            why = f"is a {type(module).__name__}"
        else:
            why = own_ways(module)
        if why is not None:
            return f"'{name}' {why}" if name else f"{type(module).__name__} {why}"
    return None


def own_ways(module: nn.Module) -> str | None:
    """The reason why this instance computes something else than its class; None if it does not."""
    if "forward" in vars(module):
        return "has a forward of its own"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a hook on its forward"
    return None
