"""Areas under ROC curves, and thresholds, by hand."""

from __future__ import annotations

import pytest
import torch

from foretoken.train.roc import auc, smallest_threshold


@pytest.mark.parametrize(
    ("scores", "good", "wanted"),
    [
        ([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1], 1.0),
        ([4.0, 3.0, 2.0, 1.0], [0, 0, 1, 1], 0.0),
        ([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 1], 0.5),
        ([1.0, 2.0, 2.0, 3.0], [0, 0, 1, 1], 0.875),
        ([1.0, 2.0], [1, 1], None),
    ],
)
def test_auc(scores: list[float], good: list[int], wanted: float | None) -> None:
    assert auc(torch.tensor(scores), torch.tensor(good).bool()) == wanted


@pytest.mark.parametrize(
    ("false_accepts", "wanted"),
    [(0.0, 0.9), (0.24, 0.9), (0.25, 0.7), (0.5, 0.7), (0.75, 0.1), (0.99, 0.1), (1.0, 0.0)],
)
def test_the_smallest_threshold_by_hand(false_accepts: float, wanted: float) -> None:
    score_N, good_N = torch.tensor([0.9, 0.1, 0.95, 0.7, 0.7, 0.2]), torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    found = smallest_threshold(score_N, good_N, false_accepts)
    assert found == pytest.approx(wanted)
    above = [float((score_N[~good_N] > level).float().mean()) for level in (found, found - 1e-6)]
    assert above[0] <= false_accepts
    assert above[1] > false_accepts or found == 0.0  # no smaller one would do


def test_a_share_of_the_bad_ones_is_counted_exactly() -> None:
    score_N = torch.linspace(0.01, 0.5, 50)
    assert int((score_N > smallest_threshold(score_N, torch.zeros(50).bool(), 0.02)).sum()) == 1
