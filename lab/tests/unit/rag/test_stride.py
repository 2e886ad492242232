"""The stride that maximises verified steps per second, and the estimates that it is chosen by."""

from __future__ import annotations

import pytest

from foretoken_lab.rag.stride import Strides, best_stride


def simulated(s, gamma, a, b, asynchronous):
    """Steps per second by adding up what can happen."""
    steps = seconds = 0.0
    for right in range(s + 1):  # leading right guesses
        chance = gamma**s if right == s else gamma**right * (1 - gamma)
        steps += chance * (min(right + 1, s))
        whole = right == s
        seconds += chance * ((s - 1) * a + max(a, b) if asynchronous and whole else s * a + b)
    return steps / seconds


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("gamma", [0.05, 0.4, 0.8, 0.95])
@pytest.mark.parametrize("search", [(0.0, 0.01), (0.05, 0.0), (0.3, 0.02), (0.001, 0.0)])
def test_the_stride_is_the_best_of_all(asynchronous, gamma, search):
    rates = {
        s: simulated(s, gamma, 0.02, search[0] + search[1] * s, asynchronous) for s in range(1, 17)
    }  # fmt: skip
    chosen = best_stride(gamma, 0.02, search, asynchronous=asynchronous)
    assert rates[chosen] == pytest.approx(max(rates.values()), rel=1e-9)


def test_limits():
    assert best_stride(0.01, 0.02, (0.05, 0.0), asynchronous=False) == 1  # guesses are wrong
    assert best_stride(0.9, 0.02, (0.0, 0.01), asynchronous=False) == 1  # a search costs by the query: nothing to gain
    assert best_stride(0.9, 0.001, (1.0, 0.0), asynchronous=False) == 16  # a search is expensive, whatever it is of
    assert best_stride(0.6, 0.02, (0.01, 0.0), asynchronous=True) == 1  # it hides after one step


def test_estimates_follow_measurements():
    strides = Strides(None, asynchronous=False)
    assert strides.next() == 1
    for s in (1, 2, 4, 8, 3, 5, 1, 7):
        strides.searched(s, 0.1 + 0.02 * s)
        strides.stepped(0.004)
        strides.judged(s, wrong=False)
    assert strides.search_seconds == pytest.approx((0.1, 0.02))
    assert strides.step_seconds == pytest.approx(0.004)
    assert strides.gamma == pytest.approx(32 / 33)
    assert strides.next() == best_stride(strides.gamma, 0.004, (0.1, 0.02), asynchronous=False) > 4


def test_a_search_never_gets_cheaper_with_more_queries():
    strides = Strides(None, asynchronous=False)
    for s, seconds in ((1, 0.2), (8, 0.1)):  # noise
        strides.searched(s, seconds)
    fixed, slope = strides.search_seconds
    assert slope == 0
    assert 0.1 < fixed < 0.2


def test_a_fixed_stride_stays():
    strides = Strides(3, asynchronous=True)
    strides.judged(0, wrong=True)
    assert strides.next() == 3
