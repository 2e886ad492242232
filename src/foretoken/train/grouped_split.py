"""Training and held-out rows that do not share a document or a question: neighbours are alike."""

import torch
from torch import Tensor


def grouped_split(group_N: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """bool [N]: the rows to train on, about ``share`` of the groups, drawn at random; at least one group.

    Args:
        group_N: int64, which document or question each row belongs to.
    """
    groups = group_N.unique()
    chosen = groups[torch.randperm(len(groups), generator=generator)[: max(1, round(len(groups) * share))]]
    return torch.isin(group_N, chosen)
