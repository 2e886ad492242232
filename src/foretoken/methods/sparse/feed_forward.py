"""Sparse feed-forward: verification with fewer channels of a gated MLP, and fewer experts of a mixture.

Channels with a gate that is nearly shut:

    g = act(x Wg)                     dense
    keep = |g| >= tau                 row by row
    y = (g * (x Wu))[keep] Wd[keep]   the other channels are zero

Each row selects its channels alone; weights are read for the union over the rows. So a row's result does not depend on
its neighbours, and many rows save less than one: with more rows nearly every channel is kept by some row, unless the
activation is exactly zero for many (ReLU, not SiLU).

Experts: the k chosen experts of a row have weights w_1 >= ... >= w_k. What leaving out the i lowest would cost is
measured by

    r_i = (w_k + ... + w_{k-i+1}) / (w_1 + ... + w_{k-i})          i = 1 .. k-1

and compared with beta_i, the median of r_i over text (calibration.py): it is cheap where r_i < beta_i. At most m
< k experts of a row are dropped. The weights of those that stay are scaled up to the old sum if the model normalises
its weights, else left alone: that is the model's own convention. Shared experts are never dropped. Only experts that
some row still needs are read.

Letters: R rows, D width, F channels, E experts, k chosen per row.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.forward.feed_forward import Forward, GatedMLP, Linear, RoutedExperts, gated_mlps

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
    """Replaces a gated MLP by its sparse form.

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
        return self.mlp.down(shut(self.mlp.act(gate_RF), self.tau) * up_RF)


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


Rule = Callable[[Tensor, int], Tensor]


def ratios(weights_Rk: Tensor) -> Tensor:
    """r_1 .. r_{k-1} of each row, float32 [R, k - 1]: the lowest i over the highest k - i; any order of the weights."""
    w_Rk = weights_Rk.float().sort(dim=-1, descending=True).values
    lowest = w_Rk.flip(-1).cumsum(-1)[:, :-1]  # sums of the lowest 1, 2 ... k - 1
    highest = w_Rk.cumsum(-1)[:, :-1].flip(-1)  # and of the others
    return lowest / highest


def nested(cheap_Rm: Tensor, m: int) -> Tensor:
    """Drop one more as long as that is cheap: the number of leading tests that a row passes."""
    return cheap_Rm.long().cumprod(-1).sum(-1)


def largest(cheap_Rm: Tensor, m: int) -> Tensor:
    """The largest number of which the row passes the test."""
    numbers_m = torch.arange(1, m + 1, device=cheap_Rm.device)
    return (cheap_Rm * numbers_m).amax(-1)


def all_or_none(cheap_Rm: Tensor, m: int) -> Tensor:
    """m if the row passes the last test, else none."""
    return cheap_Rm[:, -1].long() * m


RULES: dict[str, Rule] = {"nested": nested, "largest": largest, "all_or_none": all_or_none}


class Skip:
    """Which experts of a row are left out, in one layer.

    Paper:   arXiv:2512.21911 (sparse MoE) over Lu et al. 2024, arXiv:2402.14800 (dynamic skipping, k = 2).
    Exact:   no; with m = 0 the plan does not touch the experts.
    Differs: the paper caps the number dropped and compares ratios with medians, but neither the ratio for more than one
             expert nor the order of the tests could be read: ours are above, ``nested`` by default. For k = 2 all rules
             are that of Lu et al.: drop the second expert if w_2 < beta w_1.

    Args:
        beta: beta_1 .. beta_{k-1} of the layer.
        m: experts dropped of a row at most, 1 <= m < k.
        rule: a name of RULES.
        renormalised: whether the model scales weights to a fixed sum.
    """

    def __init__(self, beta: Sequence[float], m: int, rule: str, renormalised: bool) -> None:
        if not 1 <= m <= len(beta):
            raise ValueError(f"m={m} with thresholds for {len(beta)}")
        self.beta = tuple(beta)
        self.m = m
        self.rule = RULES[rule]
        self.renormalised = renormalised

    def __call__(self, weights_Rk: Tensor) -> tuple[Tensor, Tensor]:
        """New weights [R, k], zero where dropped, and bool [R, k]: which stay."""
        r_Rm = ratios(weights_Rk)[:, : self.m]
        beta_m = torch.tensor(self.beta[: self.m], dtype=r_Rm.dtype, device=r_Rm.device)
        dropped_R = self.rule(r_Rm < beta_m, self.m)
        # rank 0 is the highest weight; ties by position, so that exactly so many are dropped
        order_Rk = weights_Rk.argsort(dim=-1, descending=True, stable=True)
        rank_Rk = torch.empty_like(order_Rk).scatter_(
            -1, order_Rk, torch.arange(order_Rk.shape[-1], device=order_Rk.device).expand_as(order_Rk)
        )
        stay_Rk = rank_Rk < weights_Rk.shape[-1] - dropped_R[:, None]
        kept_Rk = torch.where(stay_Rk, weights_Rk, torch.zeros_like(weights_Rk))
        if self.renormalised:
            whole_R1, left_R1 = (each.float().sum(-1, keepdim=True) for each in (weights_Rk, kept_Rk))
            scaled_Rk = (kept_Rk.float() * (whole_R1 / left_R1)).to(weights_Rk.dtype)
            kept_Rk = torch.where(dropped_R[:, None] > 0, scaled_Rk, kept_Rk)  # untouched rows bit for bit
        return kept_Rk, stay_Rk


def _in_groups(experts: RoutedExperts) -> bool:
    """Whether torch can multiply groups of rows with a weight each: it asks for rows of whole 16 bytes."""
    if experts.weights is None:
        return False
    _, weight = experts.weights
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    return all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])


class SparseExperts:
    """Replaces the routed experts of a layer by their sparse form.

    Args:
        experts: the module's parts.
        skip: which experts a row goes without; None: none.
        tau: threshold of the channels inside an expert (methods/sparse/feed_forward.py); 0: all are kept.
    """

    def __init__(self, experts: RoutedExperts, skip: Skip | None, tau: float) -> None:
        self.experts = experts
        self.skip = skip
        self.tau = tau
        self._in_groups = _in_groups(experts)
        self.num_needed = 0  # of the last call: different experts that some row needed

    def __call__(self, x_RD: Tensor, chosen_Rk: Tensor, weights_Rk: Tensor) -> Tensor:
        """[R, D], [R, k], [R, k] -> [R, D]; reads the union of the experts that stay, each once."""
        stay_Rk = torch.ones_like(chosen_Rk, dtype=torch.bool)
        if self.skip is not None:
            weights_Rk, stay_Rk = self.skip(weights_Rk)
        num_rows, k = chosen_Rk.shape
        # pairs (row, place) in order of their expert; those that were dropped come last, and are not computed
        expert_P = torch.where(stay_Rk, chosen_Rk, self.experts.num_experts).flatten()
        order_P = expert_P.argsort(stable=True)
        counts_E = torch.bincount(expert_P, minlength=self.experts.num_experts + 1)[:-1]
        counts = counts_E.tolist()
        pairs = order_P[: sum(counts)]
        if self.tau or not self._in_groups:
            parts = zip(counts, torch.split(pairs, counts), strict=True)
            found = [self._one(e, x_RD[rows // k]) for e, (count, rows) in enumerate(parts) if count]
            y_PD = torch.cat(found)
        else:
            y_PD = self._together(x_RD[pairs // k], counts_E.cumsum(0).to(torch.int32))
        wide = torch.promote_types(x_RD.dtype, weights_Rk.dtype)  # some routers give float32 weights
        out_PD = x_RD.new_zeros(num_rows * k, x_RD.shape[-1], dtype=wide)
        out_PD[pairs] = y_PD * weights_Rk.flatten()[pairs, None]
        self.num_needed = sum(count > 0 for count in counts)
        return out_PD.view(num_rows, k, -1).sum(1).to(x_RD.dtype)

    def _together(self, x_PD: Tensor, ends_E: Tensor) -> Tensor:
        """All experts in two products of groups; a group without rows is not read."""
        assert self.experts.weights is not None
        gate_up_EFD, down_EDF = self.experts.weights
        gate_PF, up_PF = F.grouped_mm(x_PD, gate_up_EFD.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
        return F.grouped_mm(self.experts.act(gate_PF) * up_PF, down_EDF.transpose(1, 2), offs=ends_E)

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        if not self.tau:
            return self.experts.of(expert, x_RD)
        act = self.experts.act
        if self.experts.weights is None:  # all channels are read, and only the numbers are those of the sparse expert
            gate_up, down = self.experts.linears(expert)
            gate_RF, up_RF = gate_up(x_RD).chunk(2, dim=-1)
            return down(shut(act(gate_RF), self.tau) * up_RF)
        gate_up_EFD, down_EDF = self.experts.weights
        gate_FD, up_FD = gate_up_EFD[expert].chunk(2)
        return picked_mlp(x_RD, ((gate_FD, None), (up_FD, None), (down_EDF[expert], None)), act, self.tau)
