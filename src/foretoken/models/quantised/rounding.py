"""``dtype="int8"`` and ``dtype="int4"``: any checkpoint, rounded when it is loaded.

Every plain linear layer is rounded to the nearest code (weight.py), the head included; an embedding that is also the
head stays beside it as it is. Norms, biases, routers and weights that are not linear layers (experts in one tensor,
convolutions) keep the checkpoint's dtype. The result is a model of its own: what a recipe promises, it promises of this
model's plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from foretoken.core.errors import ConfigError
from foretoken.models.plain import why_not_plain
from foretoken.models.quantised.weight import QuantisedLinear, rounded


class Scheme(NamedTuple):
    """How weights are rounded.

    Attributes:
        bits: 8 or 4.
        group: elements that share a scale; None: a whole row.
    """

    bits: int
    group: int | None


SCHEMES = {"int8": Scheme(8, None), "int4": Scheme(4, 32)}
_ROUTERS = ("gate", "router", "shared_expert_gate")  # small, and a wrong choice of an expert costs much


def round_weights(model: Any, dtype: str, name: str) -> None:
    """Replace the plain linear layers of a model on the CPU by quantised ones.

    Args:
        model: of transformers, in eval mode.
        dtype: one of ``SCHEMES``.
        name: of the model, for messages.
    Raises:
        ConfigError: it is quantised already, or has rows that are not whole groups.
        ModelError: a weight is not finite.
    """
    scheme = SCHEMES[dtype]
    if precision_of(model) is not None:
        raise ConfigError(f"dtype='{dtype}': the weights of model '{name}' are quantised already; leave dtype out")
    for parent, part, path in list(_linears(model)):
        linear = getattr(parent, part)
        if scheme.group is not None and linear.in_features % scheme.group:
            raise ConfigError(
                f"dtype='{dtype}': the tensor '{path}.weight' of model '{name}' has rows of {linear.in_features} "
                f"elements, which are no groups of {scheme.group}; use dtype='int8'"
            )
        weight = rounded(linear.weight, *scheme, name=f"{path}.weight")
        setattr(parent, part, QuantisedLinear(weight, linear.bias).eval())


def precision_of(model: Any) -> str | None:
    """What a model's weights are rounded to: the fewest bits that a layer has; None if none is."""
    bits = [module.quantised.bits for module in model.modules() if isinstance(module, QuantisedLinear)]
    return f"int{min(bits)}" if bits else None


def _linears(model: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """Each layer that is rounded: its parent, its name there, and its whole name."""
    for path, parent in model.named_modules():
        for part, child in parent.named_children():
            if part not in _ROUTERS and why_not_plain(child) is None:
                yield parent, part, f"{path}.{part}" if path else part
