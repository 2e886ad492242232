"""The paired interval against the paper's own example and against simulation."""

from __future__ import annotations

import random

import pytest

from foretoken_lab.tasks.difference import paired_difference


def answers(both, first_only, second_only, neither):
    first = [True] * (both + first_only) + [False] * (second_only + neither)
    second = [True] * both + [False] * first_only + [True] * second_only + [False] * neither
    return first, second


def test_the_example_of_the_paper():
    found = paired_difference(*answers(36, 12, 2, 0))
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    assert (found.num_pairs, found.first_only, found.second_only) == (50, 12, 2)


def test_equal_runs_differ_by_nothing_but_not_for_certain():
    found = paired_difference(*answers(70, 0, 0, 30))
    assert found.mean == 0.0
    assert -0.05 < found.low < 0.0 < found.high < 0.05
    tiny = paired_difference(*answers(2, 0, 0, 1))
    assert tiny.high > found.high


def test_exchanging_the_runs_mirrors_the_interval():
    first, second = answers(40, 9, 3, 20)
    one, other = paired_difference(first, second), paired_difference(second, first)
    assert (one.mean, one.low, one.high) == pytest.approx((-other.mean, -other.high, -other.low))


def test_the_interval_covers_the_truth_about_19_times_in_20():
    rng = random.Random(0)
    covered = 0
    for _ in range(1000):
        pairs = rng.choices([(1, 1), (1, 0), (0, 1), (0, 0)], [0.6, 0.15, 0.05, 0.2], k=80)
        found = paired_difference([bool(a) for a, _ in pairs], [bool(b) for _, b in pairs])
        covered += found.low <= 0.10 <= found.high
    assert 0.93 < covered / 1000 < 0.98


def test_pairs_are_needed():
    with pytest.raises(ValueError, match="1 and 2 answers"):
        paired_difference([True], [True, False])
    with pytest.raises(ValueError, match="0 and 0 answers"):
        paired_difference([], [])
