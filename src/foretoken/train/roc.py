"""How well scores separate good from bad, and the threshold to choose."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auc(score_N: Tensor, good_N: Tensor) -> float | None:
    """Area under the ROC curve: the chance that a good one scores above a bad one, ties half; None without both."""
    good, bad = int(good_N.sum()), int((~good_N).sum())
    if not good or not bad:
        return None
    _, inverse_N, counts = torch.unique(score_N.double(), return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1) / 2.0  # the mean rank of each value, from 1
    return (float(ranks[inverse_N][good_N].sum()) - good * (good + 1) / 2) / (good * bad)


def smallest_threshold(score_N: Tensor, good_N: Tensor, false_accepts: float) -> float:
    """The smallest threshold that at most this share of the bad ones is above; 0 if any number of them may be.

    Args:
        score_N: probabilities.
        good_N: bool; at least one is bad.
    """
    bad = score_N[~good_N].sort(descending=True).values.tolist()
    allowed = math.floor(false_accepts * len(bad) + 1e-9)  # 0.02 * 50 may be a hair below 1
    return bad[allowed] if allowed < len(bad) else 0.0
