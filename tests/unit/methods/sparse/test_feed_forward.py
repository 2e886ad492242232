"""Sparse MLPs and sparse experts: the formulas, and that nothing of other rows leaks in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foretoken.forward.feed_forward import GatedMLP, RoutedExperts, stacked
from foretoken.methods.sparse.feed_forward import (
    RULES,
    Skip,
    SparseExperts,
    SparseMLP,
    picked,
    picked_mlp,
    ratios,
    shut,
)

MLP_WIDTH, MLP_CHANNELS = 24, 96


class MLP(nn.Module):
    def __init__(self, bias=False, act=F.silu, packed=False):
        super().__init__()
        torch.manual_seed(0)
        kind = Unreadable if packed else nn.Linear
        self.gate, self.up = kind(MLP_WIDTH, MLP_CHANNELS, bias), kind(MLP_WIDTH, MLP_CHANNELS, bias)
        self.down = kind(MLP_CHANNELS, MLP_WIDTH, bias)
        self.act = act

    def parts(self):
        return GatedMLP(0, self, lambda x: (self.gate(x), self.up(x)), self.down, self.act, (self.gate, self.up))


class Unreadable(nn.Linear):
    """As if its weights lay packed."""


def mlp_by_hand(mlp, x, tau):
    """The specification (b2), one row and one channel at a time."""
    rows = []
    for row in x:
        g = mlp.act(mlp.gate(row))
        keep = [i for i in range(MLP_CHANNELS) if abs(float(g[i])) >= tau]
        h = g[keep] * F.linear(row, mlp.up.weight[keep], None if mlp.up.bias is None else mlp.up.bias[keep])
        rows.append(F.linear(h, mlp.down.weight[:, keep], mlp.down.bias))
    return torch.stack(rows)


def random_rows(num, seed=1):
    return torch.randn(num, MLP_WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [F.silu, F.relu], ids=lambda act: act.__name__)
@pytest.mark.parametrize("tau", [0.05, 0.3, 0.6])
def test_rows_together_and_alone_are_the_specification(tau, act, bias, packed):
    mlp = MLP(bias, act, packed)
    x = random_rows(9)
    with torch.inference_mode():
        wanted = mlp_by_hand(mlp, x, tau)
        sparse = SparseMLP(mlp.parts(), tau)
        torch.testing.assert_close(sparse(x), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([sparse(row[None]) for row in x]), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sparse(x[None])[0], wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - mlp.parts().dense(x)).abs().max() > 1e-3, "nothing was left out"


def test_channels_that_no_row_keeps_are_not_read():
    mlp = MLP(act=F.relu)
    x = random_rows(2)
    with torch.inference_mode():
        gate = mlp.act(mlp.gate(x))
        tau = float(gate.flatten().quantile(0.9))
        keep = (gate.abs() >= tau).any(0)
        mlp.up.weight[~keep] = torch.nan
        mlp.down.weight[:, ~keep] = torch.nan
        assert torch.isfinite(SparseMLP(mlp.parts(), tau)(x)).all()
        assert SparseMLP(mlp.parts(), 0.0)(x).isnan().all()


def test_picking_pays_only_below_a_third_of_the_channels():
    g = torch.zeros(3, 90)
    g[0, :20], g[1, 10:29] = 1.0, -1.0
    assert picked(g).tolist() == list(range(29))
    g[2, 29] = 1.0
    assert picked(g) is None


def test_the_threshold_itself_stays():
    g = torch.tensor([[0.1, -0.1, 0.0999, -0.2]])
    assert shut(g, 0.1).tolist() == torch.tensor([[0.1, -0.1, 0.0, -0.2]]).tolist()


def test_a_row_that_keeps_nothing_gives_the_bias_alone():
    mlp = MLP(bias=True)
    with torch.inference_mode():
        found = picked_mlp(random_rows(2), mlp.parts().plain_weights(), mlp.act, 1e9)
        torch.testing.assert_close(found, mlp.down.bias.expand(2, MLP_WIDTH))


WIDTH, CHANNELS, NUM_EXPERTS = 16, 12, 10


def rows_of_weights(k, *, normalised, rows=200, seed=0, sort=True):
    """Softmax weights of the k best of ten experts, as routers give them."""
    logits = 2 * torch.randn(rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, chosen = logits.softmax(-1).topk(k)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if not sort:
        order = torch.stack([torch.randperm(k, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
        weights, chosen = weights.gather(1, order), chosen.gather(1, order)
    return weights, chosen


def reference(weights, beta, m, rule, renormalise):
    """One row by the specification (b3), in float64: the new weights, zero where dropped."""
    k = len(weights)
    order = sorted(range(k), key=lambda place: -weights[place])
    w = [weights[place] for place in order]
    r = {i: sum(w[k - i :]) / sum(w[: k - i]) for i in range(1, k)}
    cheap = {i: r[i] < beta[i - 1] for i in range(1, k)}
    if rule == "nested":
        i = 0
        while i < m and cheap[i + 1]:
            i += 1
    elif rule == "largest":
        i = max([j for j in range(1, m + 1) if cheap[j]], default=0)
    else:
        i = m if cheap[m] else 0
    dropped = set(order[k - i :])
    kept = [0.0 if place in dropped else weights[place] for place in range(k)]
    scale = sum(weights) / sum(kept) if renormalise else 1.0
    return [each * scale for each in kept]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("k", "m"), [(2, 1), (4, 1), (4, 2), (4, 3), (6, 4)])
def test_a_rule_is_the_specification(k, m, rule, renormalise):
    weights, _ = rows_of_weights(k, normalised=renormalise, sort=k != 4)
    beta = ratios(weights).median(0).values.add(0.01).tolist()  # off the medians: no test at equality
    kept, stay = Skip(beta, m, rule, renormalise)(weights)
    wanted = [reference(row, beta, m, rule, renormalise) for row in weights.double().tolist()]
    torch.testing.assert_close(kept.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert torch.equal(stay, torch.tensor(wanted) > 0)
    dropped = k - stay.sum(1)
    assert dropped.max() <= m
    assert 0 < dropped.gt(0).float().mean() < 1, "a test in which nothing happens proves nothing"


def test_with_two_experts_every_rule_is_the_published_one():
    """Lu et al.: drop the second where w2 < beta w1."""
    weights, _ = rows_of_weights(2, normalised=True)
    beta = float((weights[:, 1] / weights[:, 0]).median()) + 1e-4
    for rule in RULES:
        _, stay = Skip([beta], 1, rule, True)(weights)
        assert torch.equal(~stay[:, 1], weights[:, 1] < beta * weights[:, 0])
        assert stay[:, 0].all()


def test_ratios_by_hand():
    found = ratios(torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]]))
    torch.testing.assert_close(found, torch.tensor([[0.2 / 0.8, 0.5 / 0.5]] * 2))


def test_renormalising_keeps_the_models_own_sum():
    """Some routers scale the normalised weights by a constant; the kept ones must add up to the same."""
    weights, _ = rows_of_weights(4, normalised=True)
    weights = 2.5 * weights
    kept, stay = Skip([9.0] * 3, 3, "nested", True)(weights)
    torch.testing.assert_close(kept.sum(1), torch.full((len(kept),), 2.5))
    raw, _ = Skip([9.0] * 3, 3, "nested", False)(weights)
    assert torch.equal(raw, torch.where(stay, weights, 0.0))
    assert (raw.sum(1) < 2.4).any()


def test_untouched_rows_and_equal_weights():
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25]]).bfloat16()
    kept, stay = Skip([9.0, 0.0, 0.0], 3, "nested", True)(weights)
    assert stay.tolist() == [[True, True, True, False]]  # exactly one of equals
    kept, stay = Skip([0.0, 0.0, 0.0], 3, "nested", True)(weights)
    assert torch.equal(kept, weights)
    assert stay.all()


@pytest.mark.parametrize("m", [0, 3])
def test_a_number_beyond_the_thresholds_is_refused(m):
    with pytest.raises(ValueError, match="thresholds for 2"):
        Skip([0.1, 0.2], m, "nested", True)


# ---------------------------------------------------------------------- computation


def experts(k, seed=1, channels=CHANNELS):
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(NUM_EXPERTS, 2 * channels, WIDTH, generator=generator)
    down = torch.randn(NUM_EXPERTS, WIDTH, channels, generator=generator)
    return RoutedExperts(
        layer=0,
        module=torch.nn.Identity(),
        num_experts=NUM_EXPERTS,
        num_chosen=k,
        renormalised=True,
        linears=stacked(gate_up, down),
        weights=(gate_up, down),
        size=3 * channels * WIDTH,
        act=F.silu,
    )


def experts_by_hand(parts, x, chosen, weights, tau=0.0):
    """The weighted sum over the experts that have a weight, row by row, channel tests included."""
    y = torch.zeros_like(x)
    gate_up, down = parts.weights
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            g = parts.act(gate)
            g = torch.where(g.abs() >= tau, g, 0.0)
            y[row] += weight * (down[expert] @ (g * up))
    return y


@pytest.mark.parametrize("tau", [0.0, 0.2, 2.0])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("channels", [CHANNELS, 10], ids=["in groups", "one by one"])
def test_the_union_of_needed_experts_computes_what_each_row_alone_does(rows, tau, channels):
    k = 4
    parts = experts(k, channels=channels)
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))
    weights, chosen = rows_of_weights(k, normalised=True, rows=rows, seed=3)
    skip = Skip([0.5, 0.6, 0.9], 2, "nested", True)
    sparse = SparseExperts(parts, skip, tau)
    kept, stay = skip(weights)
    together = sparse(x, chosen, weights)
    torch.testing.assert_close(together, experts_by_hand(parts, x, chosen, kept, tau), rtol=1e-4, atol=1e-4)
    assert sparse.num_needed == len({int(e) for e in chosen[stay]})
    alone = torch.cat([sparse(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(rows)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_only_needed_experts_are_read():
    """Weights of an unused expert may be anything at all."""
    parts = experts(2)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    weights, chosen = torch.tensor([[0.9, 0.1]]).expand(5, 2), torch.tensor([[1, 2], [1, 3], [4, 2], [4, 3], [1, 2]])
    parts.weights[0][[0, 2, 3, 5, 6, 7, 8, 9]] = torch.nan
    sparse = SparseExperts(parts, Skip([0.5], 1, "nested", True), 0.0)
    assert torch.isfinite(sparse(x, chosen, weights)).all()
    assert sparse.num_needed == 2
    assert SparseExperts(parts, None, 0.0)(x, chosen, weights).isnan().any()
