"""Sparse MLPs: the threshold is a row's own affair, and what is read follows the union of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foretoken.methods.sparse.ffn import SparseMLP, picked, picked_mlp, shut
from foretoken.models.feed_forward import GatedMLP

WIDTH, CHANNELS = 24, 96


class MLP(nn.Module):
    def __init__(self, bias=False, act=F.silu, packed=False):
        super().__init__()
        torch.manual_seed(0)
        kind = Unreadable if packed else nn.Linear
        self.gate, self.up = kind(WIDTH, CHANNELS, bias), kind(WIDTH, CHANNELS, bias)
        self.down = kind(CHANNELS, WIDTH, bias)
        self.act = act

    def parts(self):
        return GatedMLP(0, self, lambda x: (self.gate(x), self.up(x)), self.down, self.act, (self.gate, self.up))


class Unreadable(nn.Linear):
    """As if its weights lay packed."""


def by_hand(mlp, x, tau):
    """The specification (b2), one row and one channel at a time."""
    rows = []
    for row in x:
        g = mlp.act(mlp.gate(row))
        keep = [i for i in range(CHANNELS) if abs(float(g[i])) >= tau]
        h = g[keep] * F.linear(row, mlp.up.weight[keep], None if mlp.up.bias is None else mlp.up.bias[keep])
        rows.append(F.linear(h, mlp.down.weight[:, keep], mlp.down.bias))
    return torch.stack(rows)


def random_rows(num, seed=1):
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [F.silu, F.relu], ids=lambda act: act.__name__)
@pytest.mark.parametrize("tau", [0.05, 0.3, 0.6])
def test_rows_together_and_alone_are_the_specification(tau, act, bias, packed):
    mlp = MLP(bias, act, packed)
    x = random_rows(9)
    with torch.inference_mode():
        wanted = by_hand(mlp, x, tau)
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
        torch.testing.assert_close(found, mlp.down.bias.expand(2, WIDTH))
