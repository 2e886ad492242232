"""The stride that maximises verified steps per second, and the estimates that it is chosen by."""

from __future__ import annotations

import random

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


def replayed(strides: Strides, *, slow: set[int], gamma: float = 0.9, rounds: int = 300) -> float:
    """Verified steps per second of rounds in which a search of many queries costs as much as one, and some are slow."""
    rng, steps, seconds = random.Random(1), 0, 0.0
    for _ in range(rounds):
        stride = strides.next()
        right = next((i for i in range(stride) if rng.random() >= gamma), stride)
        search = 0.034 * (8.0 if stride in slow else 1.0)
        slow.discard(stride)
        strides.searched(stride, search)
        strides.stepped(0.016)
        strides.judged(right, wrong=right < stride)
        whole = right == stride
        seconds += (stride - 1) * 0.016 + max(0.016, search) if whole else stride * 0.016 + search
        steps += min(right + 1, stride)
    return steps / seconds


@pytest.mark.parametrize(
    ("slow", "least"),
    [((), 0.95), ((6,), 0.92), ((2, 3, 4, 5, 6, 7, 8), 0.8)],
    ids=["none", "one slow search", "each first one slow"],
)
def test_slow_searches_of_many_queries_do_not_keep_the_stride_short(slow: tuple[int, ...], least: float) -> None:
    best = max(replayed(Strides(s, asynchronous=True), slow=set()) for s in range(1, 17))
    assert replayed(Strides(None, asynchronous=True), slow=set(slow)) > least * best
    assert replayed(Strides(1, asynchronous=True), slow=set()) < 0.75 * best  # the control: the shortest stride
