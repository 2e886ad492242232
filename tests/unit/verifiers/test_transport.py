"""The parts of the linear program: how probable each drafted set is, and how many unknowns that makes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from foretoken.core.draft import Sampled, WithoutReplacement
from foretoken.verifiers.transport import num_variables, set_law, solve

Q = np.array([0.4, 0.3, 0.2, 0.07, 0.03])


def enumerated(count: int, *, distinct: bool) -> dict[tuple[int, ...], float]:
    """Every sequence of draws, one by one."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for draws in itertools.product(range(len(Q)), repeat=count):
        chance, left = 1.0, 1.0
        for place, token in enumerate(draws):
            if distinct and token in draws[:place]:
                chance = 0.0
                break
            chance *= Q[token] / left
            left -= Q[token] if distinct else 0.0
        if chance:
            found[tuple(sorted(set(draws)))] += chance
    return found


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_chance_of_a_set_is_the_sum_over_the_draws_that_give_it(count: int, distinct: bool) -> None:
    found, expected = set_law(Q, count, distinct=distinct), enumerated(count, distinct=distinct)
    assert found.keys() == expected.keys()
    for each, chance in found.items():
        assert chance == pytest.approx(expected[each], rel=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_a_token_that_has_nearly_everything_costs_no_digits(count: int) -> None:
    q = np.array([1.0 - 3e-12, 1e-12, 2e-12])
    found = set_law(q, count, distinct=True)
    if count == 2:
        assert found[1, 2] == pytest.approx(2e-24 * (1 + 1), rel=1e-6)
    assert found[(0, 1, 2)[:count]] == pytest.approx(1 / 3 if count == 2 else 1.0, rel=1e-6)
    often = set_law(q, count, distinct=False)
    assert often[(1,)] == pytest.approx(1e-12**count, rel=1e-9)


@pytest.mark.parametrize("kind", [Sampled, WithoutReplacement])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_there_is_an_unknown_for_every_member_of_every_set(kind: type, count: int) -> None:
    distinct = kind is WithoutReplacement
    if distinct and count > len(Q):
        return
    assert num_variables(kind, len(Q), count) == sum(map(len, set_law(Q, count, distinct=distinct)))


@pytest.mark.parametrize("distinct", [False, True])
def test_a_coupling_stays_within_both_distributions_and_loses_no_mass(distinct: bool) -> None:
    p = np.array([0.1, 0.1, 0.3, 0.3, 0.1])  # the rest of p is on tokens that cannot be drafted
    found = solve(p.tobytes(), Q.tobytes(), 2, distinct)
    assert sum(found.mass.values()) == pytest.approx(1.0)
    used = np.zeros(len(Q))
    for each, accepted in found.accepted.items():
        assert len(accepted) == len(each)
        assert min(accepted) >= 0.0
        assert sum(accepted) <= found.mass[each] * (1 + 1e-9)
        used[list(each)] += accepted
    assert found.left_K == pytest.approx(p - used, abs=1e-12)
    assert min(found.left_K) >= 0.0
    total = used.sum()
    # no set of accepted tokens can have more mass than p, or than the draws that meet it
    bounds = [
        math.fsum(p[list(inside)])
        + math.fsum(mass for each, mass in found.mass.items() if not set(each) <= set(inside))
        for size in range(len(Q) + 1)
        for inside in itertools.combinations(range(len(Q)), size)
    ]
    assert total == pytest.approx(min(bounds), abs=1e-9)


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("overstep", [1e-7, 1e-3, 0.2, -1e-9])
def test_what_the_solver_oversteps_is_scaled_back(
    distinct: bool, overstep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coupling stays within both distributions, so that the extra token exactly complements the accepted ones."""
    import scipy.optimize

    exact = scipy.optimize.linprog

    def inexact(*given: Any, **options: Any) -> Any:
        found = exact(*given, **options)
        found.x = found.x * (1 + overstep) if overstep > 0 else np.where(found.x > 0, found.x, overstep)
        return found

    monkeypatch.setattr(scipy.optimize, "linprog", inexact)
    p = np.array([0.1, 0.1, 0.3, 0.3, 0.1])
    found = solve.__wrapped__(p.tobytes(), Q.tobytes(), 2, distinct)
    used = np.zeros(len(Q))
    for each, accepted in found.accepted.items():
        assert min(accepted) >= 0.0
        assert math.fsum(accepted) <= found.mass[each] * (1 + 1e-12)
        used[list(each)] += accepted
    assert (used <= p * (1 + 1e-12)).all()
    assert found.left_K == pytest.approx(p - used, abs=1e-14)
    assert found.acceptance > 0.65  # and is not thrown away
