"""The optimum against three oracles of its own definition: a linear program, transport by POT, and all subsets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken_lab.studies.acceptance import race
from foretoken_lab.studies.acceptance.optimal import SCHEMES, optimal_acceptance

DRAWN = ("iid", "without_replacement", "greedy", "topk")


def draft_law(q, n, scheme):
    """Every draft tuple with its probability, straight from the scheme's definition."""
    support = [i for i in range(len(q)) if q[i] > 0]
    if scheme == "iid":
        return {x: math.prod(q[i] for i in x) for x in itertools.product(support, repeat=n)}
    n = min(n, len(support))
    ranked = sorted(support, key=lambda i: -q[i])
    if scheme == "topk":
        return {tuple(ranked[:n]): 1.0}
    if scheme in ("greedy", "hub"):
        if scheme == "hub" and len(support) > 1:  # SpecHub's own pairs, in drafting order
            a = ranked[0]
            law = {(i, a): q[i] for i in support if i != a}
            return law | {(a, i): q[a] * q[i] / math.fsum(q[j] for j in support if j != a) for i in support if i != a}
        rest = ranked[n - 1 :]
        return {(*ranked[: n - 1], i): q[i] / math.fsum(q[j] for j in rest) for i in rest}
    law = {}
    for x in itertools.permutations(support, n):
        chance = 1.0
        for j, token in enumerate(x):
            chance *= q[token] / math.fsum(q[i] for i in support if i not in x[:j])
        law[x] = chance
    return law


def over_sets(law):
    merged = {}
    for x, chance in law.items():
        merged[frozenset(x)] = merged.get(frozenset(x), 0.0) + chance
    return merged


def by_program(p, law):
    """The relaxed primal: accepted mass S(token, set), within both marginals."""
    from scipy.optimize import linprog

    sets = over_sets(law)
    cells = [(k, i) for k, tokens in enumerate(sets) for i in tokens]
    rows = np.zeros((len(sets) + len(p), len(cells)))
    for column, (k, i) in enumerate(cells):
        rows[k, column] = rows[len(sets) + i, column] = 1.0
    limits = [*sets.values(), *p]
    found = linprog(-np.ones(len(cells)), A_ub=rows, b_ub=limits, method="highs")
    assert found.success
    return -found.fun


def by_transport(p, law):
    ot = pytest.importorskip("ot")
    sets = over_sets(law)
    cost = np.array([[float(i not in tokens) for i in range(len(p))] for tokens in sets])
    weights = np.array(list(sets.values()))
    return 1.0 - ot.emd2(weights / weights.sum(), np.array(p), cost)


def by_subsets(p, law):
    sets = over_sets(law)
    best = 0.0
    for mask in range(2 ** len(p)):
        chosen = {i for i in range(len(p)) if mask >> i & 1}
        inside = math.fsum(chance for tokens, chance in sets.items() if tokens <= chosen)
        best = min(best, math.fsum(p[i] for i in chosen) - inside)
    return 1.0 + best


def random_law(rng, size):
    """Flat, peaked, with zeros, with ties, or one-hot."""
    kind = rng.integers(6)
    if kind == 0:
        law = np.zeros(size)
        law[rng.integers(size)] = 1.0
        return law
    if kind == 1:
        law = rng.integers(1, 4, size).astype(float)  # ties
    elif kind == 2:
        law = rng.dirichlet(np.ones(size)) * (rng.random(size) < 0.6)
        law[rng.integers(size)] += 0.2
    elif kind == 3:
        law = np.exp(rng.normal(size=size) * 8)  # very peaked
    else:
        law = rng.dirichlet(np.full(size, 5.0 if kind == 4 else 0.4)) + 1e-9
    return law / law.sum()


def ours(p, q, n, scheme):
    return float(optimal_acceptance(torch.tensor(p), torch.tensor(q), n, scheme))


@pytest.mark.parametrize("scheme", DRAWN)
def test_three_oracles_agree_on_small_vocabularies(scheme):
    rng = np.random.default_rng(11)
    for _ in range(40):
        size = int(rng.integers(1, 7))
        n = int(rng.integers(1, min(3, size) + 1))
        p, q = random_law(rng, size), random_law(rng, size)
        if rng.random() < 0.15:
            q = p
        law = draft_law(q.tolist(), n, scheme)
        assert math.fsum(law.values()) == pytest.approx(1.0, abs=1e-9)
        found = ours(p, q, n, scheme)
        assert found == pytest.approx(by_program(p.tolist(), law), abs=1e-8)
        assert found == pytest.approx(by_transport(p, law), abs=1e-8)
        assert found == pytest.approx(by_subsets(p, law), abs=1e-8)


@pytest.mark.parametrize("scheme", ["iid", "without_replacement"])
def test_all_subsets_of_ten_tokens_and_four_drafts(scheme):
    rng = np.random.default_rng(12)
    for n in (3, 4):
        for size in (7, 10 if scheme == "without_replacement" else 8):
            p, q = random_law(rng, size), random_law(rng, size)
            assert ours(p, q, n, scheme) == pytest.approx(by_subsets(p, draft_law(q.tolist(), n, scheme)), abs=1e-8)


def test_the_hub_equals_its_pair_distribution():
    rng = np.random.default_rng(13)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
        assert ours(p, q, 2, "hub") == pytest.approx(by_program(p, draft_law(q.tolist(), 2, "hub")), abs=1e-8)


def test_the_oracle_catches_a_wrong_distribution(monkeypatch):
    """Q of independent draws in the place of Q without replacement must not pass."""
    monkeypatch.setitem(SCHEMES, "without_replacement", SCHEMES["iid"])
    rng = np.random.default_rng(14)
    errors = []
    for _ in range(10):
        p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
        truth = by_program(p, draft_law(q.tolist(), 3, "without_replacement"))
        errors.append(abs(ours(p, q, 3, "without_replacement") - truth))
    assert max(errors) > 1e-2


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
def test_power_sums_count_as_well_as_coins(monkeypatch, spread, n):
    rng = np.random.default_rng(15)
    q_V = np.exp(spread * rng.normal(size=900))
    q_V /= q_V.sum()
    sizes = np.linspace(0, 900, 40).astype(int)
    fast = race.Race(q_V, n).chance(sizes)
    monkeypatch.setattr(race, "num_heavy", lambda num_drafts: 900)
    assert np.abs(fast - race.Race(q_V, n).chance(sizes)).max() < 1e-10


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("n", [3, 6])
def test_the_search_misses_no_prefix(noise, n):
    generator = torch.Generator().manual_seed(3)
    logits = 3.0 * torch.randn(700, generator=generator, dtype=torch.float64)
    p_V = torch.softmax(logits, 0).numpy()
    q_V = torch.softmax(logits + noise * torch.randn(700, generator=generator, dtype=torch.float64), 0).numpy()
    order = np.argsort(p_V / q_V)
    every = race.Race(q_V[order], n).chance(np.arange(701))
    best = 1.0 + (np.concatenate(([0.0], np.cumsum(p_V[order]))) - every).min()
    assert ours(p_V, q_V, n, "without_replacement") == pytest.approx(best, abs=1e-8)


def test_quadrature_agrees_with_the_closed_form_of_pairs():
    from foretoken_lab.studies.acceptance.optimal import _pair_chance

    rng = np.random.default_rng(16)
    for spread in (0.5, 3.0, 20.0):
        q_V = np.exp(spread * rng.normal(size=60))
        q_V /= q_V.sum()
        assert np.abs(race.Race(q_V, 2).chance(np.arange(61)) - _pair_chance(q_V)).max() < 1e-9


def test_published_order_of_magnitude():
    """Gaussian logits at V = 32 000: the order of schemes, and drafts that lift acceptance from .7 to above .9."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(32_000, generator=generator)
    p_V = torch.softmax(logits, 0)
    q_V = torch.softmax(logits + 0.7 * torch.randn(32_000, generator=generator), 0)
    single, pair, three, eight = (float(optimal_acceptance(p_V, q_V, n, "without_replacement")) for n in (1, 2, 3, 8))
    assert single == pytest.approx(float(torch.minimum(p_V, q_V).sum()), abs=1e-6)
    assert 0.65 < single < pair < three < eight < 1.0
    assert three > 0.85
    for n, bound in ((3, three), (8, eight)):
        independent = float(optimal_acceptance(p_V, q_V, n, "iid"))
        assert independent < bound < independent + 0.01
        assert float(optimal_acceptance(p_V, q_V, n, "greedy")) < independent


@pytest.mark.parametrize("scheme", DRAWN)
def test_limits(scheme):
    generator = torch.Generator().manual_seed(1)
    p_BV = torch.softmax(torch.randn(4, 9, generator=generator), -1)
    if scheme != "topk":
        assert torch.allclose(optimal_acceptance(p_BV, p_BV, 1, scheme), torch.ones(4, dtype=torch.float64))
    if scheme != "iid":
        q_BV = torch.softmax(torch.randn(4, 9, generator=generator), -1)
        assert torch.allclose(optimal_acceptance(p_BV, q_BV, 9, scheme), torch.ones(4, dtype=torch.float64))
    one, other = torch.eye(9)[0], torch.eye(9)[1]
    assert float(optimal_acceptance(one, other, 2, scheme)) == 0.0
    assert float(optimal_acceptance(one, one, 2, scheme)) == pytest.approx(1.0)


def test_second_drafts_from_a_tail_far_below_rounding():
    """q(top) = 1 - 1e-20: the second draft is drawn from the tail alone, and 1 - q(top) must not round to nothing."""
    q_V = torch.tensor([1.0, 6e-21, 3e-21, 1e-21], dtype=torch.float64)
    p_V = torch.tensor([0.1, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert float(optimal_acceptance(p_V, q_V, 2, "without_replacement")) == pytest.approx(
        0.1 + 0.3 + 0.3 + 0.1, abs=1e-9
    )
    third = float(optimal_acceptance(p_V, q_V, 3, "without_replacement"))
    assert third == pytest.approx(by_program(p_V.tolist(), draft_law(q_V.tolist(), 3, "without_replacement")), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_shapes_and_dtypes(dtype):
    p_BV = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]], dtype=dtype)
    alpha_B = optimal_acceptance(p_BV, p_BV.flip(0), 2, "without_replacement")
    assert alpha_B.dtype == torch.float64
    assert alpha_B.shape == (2,)
    assert optimal_acceptance(p_BV[0], p_BV[1], 2, "without_replacement") == alpha_B[0]
    assert optimal_acceptance(p_BV[:0], p_BV[:0], 2, "iid").shape == (0,)


GOOD = [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("p", "q", "n", "scheme", "message"),
    [
        ([0.5, 0.3, 0.1], GOOD, 2, "iid", r"p\[0\] sums to 0.9"),
        (GOOD, [0.5, 0.5, 0.1], 2, "iid", r"q\[0\] sums to 1.1"),
        (GOOD, [1.2, -0.1, -0.1], 2, "iid", "is negative"),
        ([math.nan, 0.5, 0.5], GOOD, 2, "iid", r"p\[0, 0\]=nan"),
        (GOOD, [math.inf, 0.0, 0.0], 2, "iid", r"q\[0, 0\]=inf"),
        (GOOD, [0.0, 0.0, 0.0], 2, "iid", "no token of positive probability"),
        (GOOD, [0.5, 0.5], 2, "iid", "has shape"),
        (GOOD, GOOD, 0, "iid", "num_drafts=0"),
        (GOOD, GOOD, True, "iid", "num_drafts=True"),
        (GOOD, GOOD, 4, "without_replacement", "above the vocabulary of 3"),
        (GOOD, GOOD, 2, "without_replacment", "did you mean 'without_replacement'"),
        (GOOD, GOOD, 3, "hub", "a hub is a pair"),
    ],
)
def test_bad_input_is_refused_with_the_reason(p, q, n, scheme, message):
    with pytest.raises(ConfigError, match=message):
        optimal_acceptance(torch.tensor(p), torch.tensor(q), n, scheme)


def test_integers_and_lists_are_refused():
    with pytest.raises(ConfigError, match="float tensor"):
        optimal_acceptance(torch.tensor([1, 0]), torch.tensor([1, 0]), 1, "iid")
    with pytest.raises(ConfigError, match="float tensor"):
        optimal_acceptance([1.0], [1.0], 1, "iid")
