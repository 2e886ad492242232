"""Wilson's and Student's intervals against scipy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foretoken.core.intervals import mean_interval, wilson_interval


@given(st.integers(0, 50), st.integers(1, 50), st.floats(0.5, 0.999))
def test_wilson_equals_scipy(successes: int, extra: int, confidence: float) -> None:
    trials = successes + extra
    expected = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    found = wilson_interval(successes, trials, confidence)
    assert found == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high, abs=1e-12))


def test_wilson_ends() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0
    with pytest.raises(ValueError, match="11 successes in 10"):
        wilson_interval(11, 10)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 10, 60])
def test_mean_interval_is_students(count: int) -> None:
    values = [math.sin(3.0 * i) for i in range(count)]
    mean, interval = mean_interval(values)
    assert interval is not None
    half = stats.t.ppf(0.975, count - 1) * stats.sem(values)
    assert mean == pytest.approx(sum(values) / count)
    assert interval == (pytest.approx(mean - half, rel=3e-3), pytest.approx(mean + half, rel=3e-3))


def test_one_value_has_no_interval() -> None:
    assert mean_interval([0.5]) == (0.5, None)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
