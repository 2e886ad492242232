"""The part of a layer after attention: a gated MLP, or a router and its experts. Found by walking the layer.

    gated MLP       y = down(act(gate(x)) * up(x))
    routed experts  y = sum over the k chosen experts e of  w_e down_e(act(gate_e(x)) * up_e(x))

The library's families share these two forms under few names: ``gate_proj``, ``up_proj``, ``down_proj`` of a gated MLP
(or ``gate_up_proj`` for the first two in one), and of routed experts one module that holds the weights of all of them,
``gate_up_proj [E, 2 F, D]`` and ``down_proj [E, D, F]``, and is called with the rows, the chosen experts and their
weights. Names can mislead, so each reading is tried: on random rows it must give the module's results.

Letters: R rows, D width, F channels of an MLP or of one expert, E experts, k chosen per row.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError, UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.forward.quantised_experts import ByExpert
from foretoken.forward.stored_embedding import dtype_of

Forward = Callable[..., Any]
Linear = tuple[Tensor, Tensor | None]  # weight [O, I] and bias [O]

_TRIAL_ROWS = 8
_EQUAL_SUMS = 0.01  # relative: weights of a row that always add up alike were normalised (bfloat16 rounds them)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """A gated MLP of one layer.

    Attributes:
        layer: index.
        module: its forward maps [..., D] to [..., D].
        gate_up: [..., D] to the gate's and the other projection, [..., F] each, biases included.
        down: [..., F] to [..., D].
        act: the activation of the gate.
        linears: the projections after ``gate_up``, two of them or both in one.
    """

    layer: int
    module: nn.Module
    gate_up: Callable[[Tensor], tuple[Tensor, Tensor]]
    down: Any
    act: Forward
    linears: tuple[Any, ...]

    def dense(self, x_RD: Tensor) -> Tensor:
        """The formula above."""
        gate_RF, up_RF = self.gate_up(x_RD)
        return self.down(self.act(gate_RF) * up_RF)

    def plain_weights(self) -> tuple[Linear, Linear, Linear] | None:
        """Gate, up and down as weights that can be read row by row; None where they are packed for a kernel."""
        if not all(type(linear) is nn.Linear for linear in (*self.linears, self.down)):
            return None
        first, last = self.linears[0], self.linears[-1]
        gate, up = (first.weight, first.bias), (last.weight, last.bias)
        if first is last:
            (gate_FD, up_FD), biases = first.weight.chunk(2), (None, None)
            if first.bias is not None:
                biases = first.bias.chunk(2)
            gate, up = (gate_FD, biases[0]), (up_FD, biases[1])
        return gate, up, (self.down.weight, self.down.bias)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The routed experts of one layer; shared experts are gated MLPs of their own.

    Attributes:
        layer: index.
        module: its forward maps (rows [R, D], chosen [R, k], weights [R, k]) to [R, D].
        num_experts: E.
        num_chosen: k.
        renormalised: whether the model scales the k weights of a row to a fixed sum.
        linears: an expert's index to its two projections: [..., D] to the gate's and the other's channels [..., 2 F],
            and [..., F] to [..., D].
        weights: of all experts, [E, 2 F, D] and [E, D, F]; None where they are quantised or packed for a kernel.
        size: parameters of one expert.
        act: the activation of the gate.
    """

    layer: int
    module: nn.Module
    num_experts: int
    num_chosen: int
    renormalised: bool
    linears: Callable[[int], tuple[Forward, Forward]]
    weights: tuple[Tensor, Tensor] | None
    size: int
    act: Forward

    def of(self, expert: int, x_RD: Tensor) -> Tensor:
        """The formula above of one expert, without its weight: [..., D] to [..., D]."""
        gate_up, down = self.linears(expert)
        gate_RF, up_RF = gate_up(x_RD).chunk(2, dim=-1)
        return down(self.act(gate_RF) * up_RF)


@contextmanager
def swapped(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replace the forwards of these modules while inside; restore them afterwards, also after an error."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in before.items():
            if own is not None:
                module.forward = own
            else:
                vars(module).pop("forward", None)


def gated_mlps(model: Any) -> list[GatedMLP]:
    """Every gated MLP of a causal model's layers, shared experts included; empty if it has none.

    Raises:
        UnsupportedArchitecture: one of them does not compute the formula.
    """
    found = []
    for number, layer in enumerate(anatomy.find(model).layers):
        for module in layer.modules():
            mlp = _as_gated(number, module)
            if mlp is not None:
                _try_mlp(mlp, model)
                found.append(mlp)
    return found


def routed_experts(model: Any) -> list[RoutedExperts]:
    """The routed experts of every layer that has some; empty for a dense model.

    Raises:
        UnsupportedArchitecture: they are laid out or called in another way; the message says which.
    """
    found = []
    for number, layer in enumerate(anatomy.find(model).layers):
        for block in layer.modules():
            module = getattr(block, "experts", None)
            if isinstance(module, nn.Module):
                found.append(_as_experts(number, block, module, model))
    return found


def _as_gated(layer: int, module: nn.Module) -> GatedMLP | None:
    parts = dict(module.named_children())
    act = parts.get("act_fn") or parts.get("activation_fn") or parts.get("activation")
    if act is None or "down_proj" not in parts:
        return None
    down = parts["down_proj"]
    if "gate_proj" in parts and "up_proj" in parts:
        gate, up = parts["gate_proj"], parts["up_proj"]
        return GatedMLP(layer, module, lambda x: (gate(x), up(x)), down, act, (gate, up))
    if "gate_up_proj" in parts:
        both = parts["gate_up_proj"]
        return GatedMLP(layer, module, lambda x: both(x).chunk(2, dim=-1), down, act, (both,))
    return None


def _trial_rows(model: Any) -> Tensor:
    embedding = model.get_input_embeddings()
    width = model.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _TRIAL_ROWS, width, generator=generator)
    return rows.to(device=next(model.parameters()).device, dtype=dtype_of(embedding))


def _try_mlp(mlp: GatedMLP, model: Any) -> None:
    x_1RD = _trial_rows(model)
    with torch.inference_mode():
        try:
            same = torch.equal(mlp.module(x_1RD), mlp.dense(x_1RD))
        except Exception as error:  # whatever a family raises for rows that it did not expect
            raise _odd(mlp.layer, mlp.module, str(error)) from error
    if not same:
        raise _odd(mlp.layer, mlp.module, "it computes something else than down(act(gate(x)) * up(x))")


def _odd(layer: int, module: nn.Module, why: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(f"layer {layer}, {type(module).__name__}: {why.strip()[:200]}")


def _as_experts(layer: int, block: nn.Module, module: nn.Module, model: Any) -> RoutedExperts:
    act = getattr(module, "act_fn", None)
    linears, weights, num_experts, size = _packed(module) if isinstance(module, ByExpert) else _plain(layer, module)
    if act is None:
        raise _odd(layer, module, "its experts have no activation")
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    own = module.forward

    def record(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        calls.append((hidden_states, top_k_index, top_k_weights))
        return own(hidden_states, top_k_index, top_k_weights)

    with torch.inference_mode(), swapped({module: record}):
        try:
            block(_trial_rows(model))
            [(x_RD, chosen_Rk, weights_Rk)] = calls
            experts = RoutedExperts(
                layer,
                module,
                num_experts=num_experts,
                num_chosen=chosen_Rk.shape[-1],
                renormalised=_renormalised(block, weights_Rk),
                linears=linears,
                weights=weights,
                size=size,
                act=act,
            )
            theirs = own(x_RD, chosen_Rk, weights_Rk)
            ours = _each_row(experts, x_RD, chosen_Rk, weights_Rk)
        except ForetokenError:
            raise
        except Exception as error:  # a router or experts of another make
            raise _odd(layer, module, f"its experts are called in another way ({str(error)[:100]})") from error
    scale = float(theirs.abs().max()) or 1.0
    if not float((ours - theirs.float()).abs().max()) <= 0.05 * scale:  # rounding of bfloat16, not another formula
        raise _odd(layer, module, "its experts compute something else than down(act(gate(x)) * up(x))")
    return experts


def stacked(gate_up_EFD: Tensor, down_EDF: Tensor) -> Callable[[int], tuple[Forward, Forward]]:
    """The projections of experts with dense weights."""

    def linears(expert: int) -> tuple[Forward, Forward]:
        return (lambda x: F.linear(x, gate_up_EFD[expert])), (lambda x: F.linear(x, down_EDF[expert]))

    return linears


_Laid = tuple[Callable[[int], tuple[Forward, Forward]], tuple[Tensor, Tensor] | None, int, int]


def _plain(layer: int, module: nn.Module) -> _Laid:
    """Of experts as the library holds them: projections, weights, number and width."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
        raise _odd(layer, module, "its experts are not one gate_up_proj and one down_proj with an activation")
    if any(name.endswith("bias") for name, _ in module.named_parameters(recurse=False)):
        raise _odd(layer, module, "its experts have biases")
    if gate_up.dim() != 3 or tuple(down.shape) != (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2):
        raise _odd(layer, module, f"its weights are laid out as {list(gate_up.shape)} and {list(down.shape)}")
    weights = gate_up.detach(), down.detach()
    return stacked(*weights), weights, len(gate_up), (gate_up.numel() + down.numel()) // len(gate_up)


def _packed(module: ByExpert) -> _Laid:
    """The same of those that are quantised, or that the native decoder has packed."""
    return module.linears, None, module.num_experts, 3 * module.width * module.channels


def _renormalised(block: nn.Module, weights_Rk: Tensor) -> bool:
    """Whether weights of a row are scaled to a fixed sum: by the router's attribute, else by their sums."""
    for router in block.children():
        said = getattr(router, "norm_topk_prob", None)
        if isinstance(said, bool):
            return said
    sums_R = weights_Rk.float().sum(-1)
    return bool(sums_R.max() - sums_R.min() <= _EQUAL_SUMS * sums_R.max())


def _each_row(experts: RoutedExperts, x_RD: Tensor, chosen_Rk: Tensor, weights_Rk: Tensor) -> Tensor:
    """The formula above, one chosen expert of one row at a time, in float32."""
    y_RD = torch.zeros(x_RD.shape, device=x_RD.device)
    for row, (chosen, weights) in enumerate(zip(chosen_Rk.tolist(), weights_Rk.tolist(), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            y_RD[row] += weight * experts.of(expert, x_RD[row]).float()
    return y_RD
