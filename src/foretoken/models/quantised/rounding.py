"""``dtype="int8"`` and ``dtype="int4"``: any checkpoint, rounded when it is loaded.

Every plain linear layer is rounded to the nearest code (weight.py), the head included, and so are routed experts with
all weights in one tensor (experts.py); an embedding that is also the head stays next to it as it is. Norms, biases,
routers, convolutions and experts of another build keep the checkpoint's dtype; the last are named in a warning. The
result is a model of its own: the guarantee of a recipe refers to this model's plain decoding.

Letters: R rows, D width, k experts of a row, E experts, F channels of one.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.forward.plain import own_ways, why_not_plain
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight, rounded
from foretoken.forward.stored_weight import RoundedWeight

log = logging.getLogger(__name__)


class Scheme(NamedTuple):
    """How weights are rounded.

    Attributes:
        bits: 8 or 4.
        group: elements that share a scale. Rows of 8 bits that are no whole groups have groups of 16, or else one.
    """

    bits: int
    group: int

    def group_of(self, inputs: int) -> int:
        """Of rows of so many elements."""
        if self.bits != 8 or inputs % self.group == 0:
            return self.group
        return 16 if inputs % 16 == 0 else inputs


SCHEMES = {"int8": Scheme(8, 32), "int4": Scheme(4, 32)}
_ROUTERS = ("gate", "wg", "router", "shared_expert_gate")  # small, and a wrong choice of an expert costs much
_TRIAL_ROWS = 4
_ROUNDING = 0.05  # relative to the largest value: the difference in bfloat16 between two orders of the same sums


def round_weights(model: Any, dtype: str, name: str, *, stored: bool = False) -> None:
    """Replace the plain linear layers and routed experts of a model on the CPU by quantised ones.

    Args:
        model: of transformers, in eval mode.
        dtype: one of ``SCHEMES``.
        name: of the model, for messages.
        stored: round weights when they are used, each time; see :class:`RoundedWeight`.
    Raises:
        ConfigError: it is quantised already, or has rows that are not whole groups.
        ModelError: a weight is not finite.
    """
    if precision_of(model) is not None:
        raise ConfigError(f"dtype='{dtype}': the weights of model '{name}' are quantised already; leave dtype out")
    for parent, part, path in list(_linears(model)):
        linear = getattr(parent, part)
        weight: QuantisedWeight = _rounded_later(linear.weight, dtype, f"{path}.weight", name)
        setattr(parent, part, QuantisedLinear(weight if stored else weight.decoded(), linear.bias).eval())
    left = []
    for parent, path in list(_mixtures(model)):
        experts = parent.experts
        reason = _why_not_stacked(experts)
        if reason is not None:
            left.append(f"'{path}' ({type(experts).__name__}) {reason}")
            continue
        pairs = []
        for expert, (gate_up_FD, down_DF) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            gate_up = _rounded_later(gate_up_FD, dtype, f"{path}.gate_up_proj[{expert}]", name)
            down = _rounded_later(down_DF, dtype, f"{path}.down_proj[{expert}]", name)
            pairs.append((gate_up, down) if stored else (gate_up.decoded(), down.decoded()))
        parent.experts = QuantisedExperts(pairs, experts.act_fn).eval()
    if left:
        log.warning("dtype='%s': %d mixtures of experts keep their dtype: %s", dtype, len(left), left[0])


def precision_of(model: Any) -> str | None:
    """The precision of a model's weights: the fewest bits of a layer; None if none is quantised."""
    bits = [module.quantised.bits for module in model.modules() if isinstance(module, QuantisedLinear)]
    bits += [module.bits for module in model.modules() if isinstance(module, QuantisedExperts)]
    return f"int{min(bits)}" if bits else None


def _linears(model: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """Each layer that is rounded: its parent, its name there, and its whole name."""
    for path, parent in model.named_modules():
        for part, child in parent.named_children():
            if part not in _ROUTERS and why_not_plain(child) is None:
                yield parent, part, f"{path}.{part}" if path else part


def _mixtures(model: Any) -> Iterator[tuple[Any, str]]:
    """Each module with routed experts in one module, and the name of that."""
    for path, parent in model.named_modules():
        experts = getattr(parent, "experts", None)
        if isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
            yield parent, f"{path}.experts" if path else "experts"


@torch.no_grad()
def _why_not_stacked(experts: Any) -> str | None:
    """Why experts are not gated MLPs with their weights in two tensors, [E, 2 F, D] and [E, D, F]; None if they are."""
    parts = dict(experts.named_parameters())
    gate_up_EFD, down_EDF = (parts.pop(name, None) for name in ("gate_up_proj", "down_proj"))
    if gate_up_EFD is None or down_EDF is None or parts or not hasattr(experts, "act_fn"):
        return "has other parts than gate_up_proj, down_proj and an activation"
    count, twice, width = gate_up_EFD.shape
    if gate_up_EFD.ndim != 3 or tuple(down_EDF.shape) != (count, width, twice // 2):
        return f"has weights {list(gate_up_EFD.shape)} and {list(down_EDF.shape)}"
    if (own := own_ways(experts)) is not None:
        return own
    x_RD = torch.randn(_TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0)).to(gate_up_EFD.dtype)
    chosen_R = torch.arange(_TRIAL_ROWS) % count
    theirs_RD = experts(x_RD, chosen_R[:, None], torch.full((_TRIAL_ROWS, 1), 0.5, dtype=x_RD.dtype)).float()
    if not theirs_RD.isfinite().all():
        return None  # rounding reports it by name
    both = torch.stack([F.linear(x_D, gate_up_EFD[e]) for x_D, e in zip(x_RD, chosen_R.tolist(), strict=True)])
    gate_RF, up_RF = both.chunk(2, dim=-1)
    hidden_RF: Tensor = experts.act_fn(gate_RF) * up_RF
    ours_RD = 0.5 * torch.stack(
        [F.linear(x_F, down_EDF[e]) for x_F, e in zip(hidden_RF, chosen_R.tolist(), strict=True)]
    )
    if not float((ours_RD.float() - theirs_RD).abs().max()) <= _ROUNDING * float(theirs_RD.abs().max()):
        return "computes something else than down(act(gate(x)) * up(x))"
    return None


def _rounded_later(weight_OK: Tensor, dtype: str, tensor: str, model: str) -> RoundedWeight:
    """A weight that is rounded at each use."""
    group = _group_of(weight_OK.shape[1], dtype, tensor, model)
    return RoundedWeight(weight_OK.detach(), SCHEMES[dtype].bits, group, tensor)


def rounded_as(weight_OK: Tensor, dtype: str, tensor: str, model: str) -> QuantisedWeight:
    """A weight in the codes of one of ``SCHEMES``; the names are for messages.

    Raises:
        ConfigError: its rows are no whole groups.
        ModelError: it is not finite.
    """
    group = _group_of(weight_OK.shape[1], dtype, tensor, model)
    return rounded(weight_OK, SCHEMES[dtype].bits, group, name=tensor)


def _group_of(inputs: int, dtype: str, tensor: str, model: str) -> int:
    group = SCHEMES[dtype].group_of(inputs)
    if inputs % group:
        raise ConfigError(
            f"dtype='{dtype}': the tensor '{tensor}' of model '{model}' has rows of {inputs} "
            f"elements, which are no groups of {group}; use dtype='int8'"
        )
    return group
