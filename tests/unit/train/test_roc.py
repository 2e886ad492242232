"""Areas under ROC curves, by hand."""

from __future__ import annotations

import pytest
import torch

from foretoken.train.roc import auc


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
