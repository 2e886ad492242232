"""The small tests that certificates rest on, against scipy and by their own error rates."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foretoken.certify.statistics import chi_square_tail, detectable_distance, goodness_of_fit, homogeneity
from foretoken_lab.intervals import wilson_interval


@given(st.floats(0.0, 400.0), st.integers(1, 200))
def test_tail_equals_scipy(statistic: float, df: int) -> None:
    assert chi_square_tail(statistic, df) == pytest.approx(stats.chi2.sf(statistic, df), rel=1e-8, abs=1e-300)


def test_tail_ends() -> None:
    assert chi_square_tail(0.0, 3) == chi_square_tail(5.0, 0) == 1.0
    assert chi_square_tail(math.inf, 3) == 0.0


def test_goodness_of_fit_equals_scipy_when_nothing_is_pooled() -> None:
    counts, law = [48, 30, 22], [0.5, 0.3, 0.2]
    found = goodness_of_fit(counts, law)
    expected = stats.chisquare(counts, [100 * p for p in law])
    assert (found.statistic, found.df) == (pytest.approx(expected.statistic), 2)
    assert found.p_value == pytest.approx(expected.pvalue)


def test_goodness_of_fit_pools_rare_cells() -> None:
    # expected 90, 4, 3, 3: the three rare ones become one cell of 10
    found = goodness_of_fit([85, 5, 5, 5], [0.9, 0.04, 0.03, 0.03])
    assert found.df == 1
    assert found.statistic == pytest.approx(25 / 90 + 25 / 10)
    # expected 55, 41, 4: a lone rare cell takes the next larger one with it
    assert goodness_of_fit([55, 41, 4], [0.55, 0.41, 0.04]).df == 1
    assert goodness_of_fit([3], [1.0]).p_value == 1.0


def test_one_impossible_observation_refutes_a_distribution() -> None:
    assert goodness_of_fit([999, 1], [1.0, 0.0]).p_value == 0.0
    assert goodness_of_fit([50, 50, 0], [0.5, 0.5, 0.0]).df == 1


def test_goodness_of_fit_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="2 counts but 1"):
        goodness_of_fit([1, 2], [1.0])
    with pytest.raises(ValueError, match="sums to"):
        goodness_of_fit([1, 2], [0.5, 0.4])


def test_homogeneity_equals_scipy() -> None:
    first, second = ["a"] * 40 + ["b"] * 60, ["a"] * 55 + ["b"] * 75 + ["c"] * 20
    first += ["c"] * 15
    found = homogeneity(first, second)
    expected = stats.chi2_contingency([[40, 60, 15], [55, 75, 20]], correction=False)
    assert (found.statistic, found.df) == (pytest.approx(expected.statistic), expected.dof)
    assert found.p_value == pytest.approx(expected.pvalue)


def test_homogeneity_pools_values_that_few_have_seen() -> None:
    first = [0] * 90 + list(range(1, 11))
    second = [0] * 90 + list(range(11, 21))
    assert homogeneity(first, second).df == 1
    assert homogeneity([1], [2]).p_value == 1.0
    with pytest.raises(ValueError, match="observations"):
        homogeneity([], [1])


def test_error_rate_and_power_are_as_stated() -> None:
    rng = random.Random(0)
    law = [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.03, 0.02]
    same = [homogeneity(rng.choices(range(9), law, k=400), rng.choices(range(9), law, k=400)) for _ in range(400)]
    low, high = wilson_interval(sum(result.p_value < 0.05 for result in same), 400, 0.999)
    assert low < 0.05 < high
    distance = detectable_distance(400, 8, alpha=0.05)
    flat = [1 / 8] * 8
    tilted = [1 / 8 + (distance / 4 if i % 2 else -distance / 4) for i in range(8)]
    found = [homogeneity(rng.choices(range(8), flat, k=400), rng.choices(range(8), tilted, k=400)) for _ in range(200)]
    assert 0.8 < sum(result.p_value < 0.05 for result in found) / 200 < 0.98
