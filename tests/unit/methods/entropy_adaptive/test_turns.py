"""Turns of the two models: entropies, the mean at the threshold, dwell, the window across a switch, both readings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foretoken.methods.entropy_adaptive.turns import EntropyTurn, Rule, entropy


def rule(threshold=1.0, window=1, dwell=1, redo=True):
    return Rule(threshold=threshold, window=window, dwell=dwell, redo=redo)


def writers(of, small, large):
    """The writer of each position ("s" or "l"), with the entropies that either model would have there."""
    turn, found = EntropyTurn.first(of), ""
    for of_small, of_large in zip(small, large, strict=True):
        if not turn.large:
            writes, turn = turn.read_by_small(of_small)
            found += "s" if writes else "l"
        else:
            turn = turn.read_by_large(of_large)
            found += "l"
    return found


def test_entropy_is_in_bits_and_ignores_added_constants():
    assert entropy(torch.zeros(8192)) == pytest.approx(13.0, abs=1e-5)
    one_hot = torch.full((8192,), -1e4)
    one_hot[7] = 0.0
    assert entropy(one_hot) == 0.0
    assert math.copysign(1.0, entropy(one_hot)) == 1.0
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    p = torch.softmax(x.double(), 0)
    assert entropy(x) == pytest.approx(float(-(p * p.log2()).sum()), abs=1e-5)
    assert entropy(x + 100.0) == pytest.approx(entropy(x), abs=1e-4)
    padded = torch.cat([x, torch.full((9,), -torch.inf)])
    assert entropy(padded) == pytest.approx(entropy(x), abs=1e-6)
    assert math.isnan(entropy(torch.tensor([0.0, math.nan])))


def test_the_alarming_position_is_the_large_models_or_with_the_other_reading_the_next_one():
    small, large = [0.0, 0.0, 9.0, 9.0, 9.0, 9.0], [9.0] * 6
    assert writers(rule(), small, large) == "ssllll"
    assert writers(rule(redo=False), small, large) == "ssslll"


def test_the_rule_chooses_the_first_writer_without_dwell_in_both_readings():
    for redo in (True, False):
        assert writers(rule(dwell=3, redo=redo), [9.0] * 4, [9.0] * 4) == "llll"
        assert writers(rule(dwell=3, redo=redo), [0.5] * 4, [9.0] * 4) == "ssss"


def test_a_mean_at_the_threshold_is_the_large_models():
    assert writers(rule(1.0), [1.0], [0.0]) == "l"
    assert writers(rule(1.0), [math.nextafter(1.0, 0.0)], [0.0]) == "s"
    assert writers(rule(0.0), [0.0] * 5, [0.0] * 5) == "lllll"
    assert writers(rule(math.inf), [13.0] * 5, [13.0] * 5) == "sssss"


def test_the_large_model_hands_over_after_its_own_position():
    assert writers(rule(), [9.0, 0.0, 0.0, 0.0], [9.0, 9.0, 0.0, 0.0]) == "llls"


def test_the_mean_is_of_what_there_is_and_goes_on_across_a_switch():
    of = rule(1.0, window=3)
    # means of the small model: 0.6, then 1.2 (alarm, of two), then the large one's 0.9 of three
    assert writers(of, [0.6, 1.8, 9.0, 0.0], [9.0, 9.0, 0.3, 9.0]) == "slls"
    _, turn = EntropyTurn.first(of).read_by_small(0.6)
    _, turn = turn.read_by_small(1.8)
    assert turn.entropies == (0.6, 1.8)
    turn = turn.read_by_large(0.3).read_by_small(5.0)[1]
    assert turn.entropies == (1.8, 0.3, 5.0)


@pytest.mark.parametrize("dwell", [1, 2, 3])
@pytest.mark.parametrize("redo", [True, False])
def test_no_run_is_shorter_than_the_dwell_but_the_last(dwell, redo):
    seen = set()
    for bits in itertools.product((0.0, 2.0), repeat=8):
        found = writers(rule(1.0, dwell=dwell, redo=redo), bits, bits[::-1])
        runs = [len(list(run)) for _, run in itertools.groupby(found)]
        assert all(run >= dwell for run in runs[:-1]), (bits, found)
        seen.add(found)
    assert len(seen) > 8


def test_turns_follow_from_entropies_alone():
    """Two copies that are called in another order, or twice, agree: reading changes nothing."""
    turn = EntropyTurn.first(rule(1.0, window=2, dwell=2))
    once = turn.read_by_small(0.3)
    turn.read_by_small(7.0)
    turn.read_by_large(7.0)
    assert turn.read_by_small(0.3) == once
