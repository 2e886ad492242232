"""How well scores separate good from bad."""

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
