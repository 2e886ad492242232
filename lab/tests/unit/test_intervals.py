"""Wilson's and Student's intervals against scipy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foretoken.certify.statistics import normal_quantile
from foretoken_lab.intervals import mean_interval, wilson_interval


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


def width_error(count: int, confidence: float) -> float:
    """How much wider a mean's interval is than Student's, as a share."""
    values = [float(i % 7) for i in range(count)]
    _, interval = mean_interval(values, confidence)
    assert interval is not None
    half = stats.t.ppf(0.5 + confidence / 2, count - 1) * stats.sem(values)
    return (interval[1] - interval[0]) / (2 * half) - 1.0


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.99])
def test_the_width_of_a_mean_s_interval_is_that_of_students_t(confidence: float) -> None:
    """Exact at one and two degrees of freedom; the error of the series vanishes with their fifth power."""
    assert width_error(2, confidence) == pytest.approx(0.0, abs=1e-12)
    assert width_error(3, confidence) == pytest.approx(0.0, abs=1e-12)
    assert -0.01 < width_error(4, confidence) < 0.0
    assert width_error(31, confidence) / width_error(61, confidence) == pytest.approx(2**5, rel=0.1)


def test_the_normal_quantile_has_the_digits_of_a_double() -> None:
    for p in (0.5, 0.6, 0.975, 0.9995):
        assert normal_quantile(p) == pytest.approx(stats.norm.ppf(p), rel=1e-14)


def test_the_usual_confidence_is_95_percent() -> None:
    assert wilson_interval(3, 10) == wilson_interval(3, 10, 0.95)
    assert mean_interval([1.0, 2.0, 4.0]) == mean_interval([1.0, 2.0, 4.0], 0.95)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([0.5]) == (0.5, None)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
