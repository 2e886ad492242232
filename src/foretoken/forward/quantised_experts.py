"""Routed experts over quantised weights, called as the library calls its own.

    y = sum over the chosen experts e of  w_e down_e(act(gate_e(x)) * up_e(x))

Each projection is a product of weight.py: a row is coded by itself, at every one of them.

Letters: R rows, D width, k experts of a row, E experts, F channels of one.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight

Pair = tuple[QuantisedWeight, QuantisedWeight]  # of one expert: [2 F, D], the gate above the other factor, and [D, F]


class ClampedGate(nn.Module):
    """GPT-OSS's ``glu(gate) * (up + 1)``, both factors clamped; called like the activation of a gate.

    Args:
        alpha: of the sigmoid; limit: of the values.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate: Tensor) -> Tensor:
        """The gate's factor."""
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha)

    def other(self, up: Tensor) -> Tensor:
        """The other one."""
        return up.clamp(-self.limit, self.limit) + 1


def in_turn(gate_up_E2FD: Tensor, down_EDF: Tensor) -> tuple[Tensor, Tensor]:
    """Weights in GPT-OSS's order: transposed, rows of the gate and of the other factor in turn."""
    experts, rows, width = gate_up_E2FD.shape
    turned = gate_up_E2FD.view(experts, 2, rows // 2, width).transpose(1, 2).flatten(1, 2)
    return turned.mT.contiguous(), down_EDF.mT.contiguous()


def in_halves(gate_up_ED2F: Tensor, down_EFD: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`in_turn`."""
    return torch.cat([gate_up_ED2F[..., ::2].mT, gate_up_ED2F[..., 1::2].mT], dim=1), down_EFD.mT.contiguous()


class ByExpert(nn.Module):
    """Routed experts with weights in another form than the library expects; computed one expert after the other.

    Attributes:
        num_experts, width, channels: E, D and F.
        act_fn: of the gate; a :class:`ClampedGate` has a factor for the other half, too.
        biases: of all experts, [E, 2 F] and [E, D], or None.
        gated: whether a gate's factor multiplies another one; else F channels are activated.
    """

    num_experts: int
    width: int
    channels: int
    act_fn: Callable[[Tensor], Tensor]
    biases: tuple[Tensor, Tensor] | None = None
    gated = True

    @abstractmethod
    def linears(self, expert: int) -> tuple[Any, Any]:
        """One expert's projections: [..., D] to the gate and the other factor [..., 2 F], and [..., F] to [..., D]."""

    @property
    def gate_up_proj(self) -> Tensor:
        """A copy in the usual order, [E, 2 F, D]."""
        return torch.stack([self.linears(expert)[0].weight for expert in range(self.num_experts)])

    @property
    def down_proj(self) -> Tensor:
        """A copy in the usual order, [E, D, F]."""
        return torch.stack([self.linears(expert)[1].weight for expert in range(self.num_experts)])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[R, D], chosen experts [R, k] and their weights [R, k] -> [R, D]"""
        sum_RD = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            gate_up, down = self.linears(expert)
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            both_n2F = gate_up(hidden_states[rows])
            if self.biases is not None:
                both_n2F = both_n2F + self.biases[0][expert]
            gate_nF, *others_nF = both_n2F.chunk(1 + self.gated, dim=-1)
            if isinstance(self.act_fn, ClampedGate):
                others_nF = [self.act_fn.other(others_nF[0])]
            y_nD = down(prod(others_nF, start=self.act_fn(gate_nF)))
            if self.biases is not None:
                y_nD = y_nD + self.biases[1][expert]
            sum_RD.index_add_(0, rows, y_nD.float() * top_k_weights[rows, places, None].float())
        return sum_RD.to(hidden_states.dtype)


class QuantisedExperts(ByExpert):
    """Experts for inference on a CPU; exact but not fast.

    Args:
        weights: of each expert.
        act_fn, biases: see :class:`ByExpert`.
    """

    def __init__(
        self, weights: Sequence[Pair], act_fn: Callable[[Tensor], Tensor], biases: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.act_fn, self.biases, self.weights = act_fn, biases, list(weights)
        if isinstance(act_fn, ClampedGate):
            self.alpha, self.limit = act_fn.alpha, act_fn.limit
        self.num_experts, (self.width, self.channels) = len(self.weights), self.weights[0][1].shape
        self.bits = self.weights[0][0].bits
        self._packed: list[tuple[nn.Module, nn.Module]] = []

    def pack(self, layer: Callable[[QuantisedWeight], nn.Module]) -> None:
        """Let layers of another kind compute the same products; the weights are theirs from now on."""
        self._packed = [(layer(gate_up), layer(down)) for gate_up, down in self.weights]
        self.weights = []

    def linears(self, expert: int) -> tuple[Any, Any]:
        """See :class:`ByExpert`."""
        if self._packed:
            return self._packed[expert]
        gate_up, down = self.weights[expert]
        return QuantisedLinear(gate_up), QuantisedLinear(down)
