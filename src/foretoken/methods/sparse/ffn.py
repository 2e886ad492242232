"""Sparse feed-forward: the channels of a gated MLP whose gate is nearly shut are left out of a verification.

    g = act(x Wg)                     dense
    keep = |g| >= tau                 row by row
    y = (g * (x Wu))[keep] Wd[keep]   the other channels are zero

Which channels count is decided for each row alone; which weights are read, by the union over the rows. So a row's
result does not depend on its neighbours, and many rows save less than one: after a few rows there is hardly a channel
that nobody keeps, unless the activation is exactly zero for many (ReLU, not SiLU).

Letters: R rows, D width, F channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.feed_forward import Forward, GatedMLP, Linear, gated_mlps

# Rows of a weight that are picked out are read, written and read again: below a third of them that is less than reading
# all of it once.
_WORTH_PICKING = 1 / 3


def shut(g_RF: Tensor, tau: float) -> Tensor:
    """The activated gate with channels below ``tau`` in absolute value set to zero, row by row: [R, F]."""
    return torch.where(g_RF.abs() < tau, torch.zeros_like(g_RF), g_RF)  # NaN stays, and is found in the logits


def picked(g_RF: Tensor) -> Tensor | None:
    """Channels that some row keeps, int64; None if they are too many for picking them out to pay."""
    union = g_RF.ne(0).any(0).nonzero()[:, 0]
    return union if len(union) < _WORTH_PICKING * g_RF.shape[1] else None


class SparseMLP:
    """What a gated MLP computes instead.

    Paper:   arXiv:2512.21911 (sparse FFN): channels with |activation| < tau enter neither the up nor the down
             projection.
    Exact:   no; at tau = 0 every channel is kept (the plan then does not swap the module at all).
    Differs: the paper does not say which activation is compared; ours is that of the gate, known before the up
             projection, so that both products are saved. Weights are read by the union of the rows where they lie plain
             in memory; where they are packed for a kernel that reads all of them, only the numbers are those of the
             sparse FFN, and no time is saved.

    Args:
        mlp: the module's parts.
        tau: threshold, in units of the activation.
    """

    def __init__(self, mlp: GatedMLP, tau: float) -> None:
        self.mlp = mlp
        self.tau = tau
        self._plain = mlp.plain_weights()

    @property
    def packed(self) -> bool:
        """Whether the weights cannot be read in part."""
        return self._plain is None

    def __call__(self, x_RD: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        if self._plain is not None:
            flat = x_RD.reshape(-1, x_RD.shape[-1])
            return picked_mlp(flat, self._plain, self.mlp.act, self.tau).view(x_RD.shape)
        gate_RF, up_RF = self.mlp.gate_up(x_RD)
        y: Tensor = self.mlp.down(shut(self.mlp.act(gate_RF), self.tau) * up_RF)
        return y


def picked_mlp(x_RD: Tensor, weights: tuple[Linear, Linear, Linear], act: Forward, tau: float) -> Tensor:
    """The gated MLP over plain weights, reading of up and down only what some row keeps: [R, D]."""
    (gate_FD, gate_bias), (up_FD, up_bias), (down_DF, down_bias) = weights
    g_RF = shut(act(F.linear(x_RD, gate_FD, gate_bias)), tau)
    union = picked(g_RF)
    if union is not None:
        g_RF, up_FD, down_DF = g_RF[:, union], up_FD[union], down_DF[:, union]
        up_bias = None if up_bias is None else up_bias[union]
    return F.linear(g_RF * F.linear(x_RD, up_FD, up_bias), down_DF, down_bias)


def sparse_mlps(model: object, tau: float) -> list[SparseMLP]:
    """One for every gated MLP of a model."""
    return [SparseMLP(mlp, tau) for mlp in gated_mlps(model)]
