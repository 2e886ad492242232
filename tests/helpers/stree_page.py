"""The paper's page of STree (methods/stree/tree_scan.py) with the arguments of forward/ssm/scan.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.forward.ssm.scan import Rows
from foretoken.methods.stree.tree_scan import activation_replay, tree_mask, tree_scan


def by_the_page(
    state_HNP: Tensor, rows: Rows, parents: Sequence[int], *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``scan.walk`` without delta nets: y [T, H, P], and the state after the last row that is not ignored.

    Args:
        causal: planted: every row sees all rows before it, as in a chain.
    """
    assert not rows.delta
    used = [row for row, parent in enumerate(parents) if parent != -2]
    place = {row: number for number, row in enumerate(used)}
    B, C, x, decay, dt, _ = rows.of(used)
    mask = tree_mask([place.get(parents[row], -1) for row in used])
    if causal:
        mask = torch.ones_like(mask).tril()
    y_THP = torch.zeros_like(rows.v_THP)
    y_THP[used] = tree_scan(x, dt, decay, B, C, state_HNP, mask)
    return y_THP, activation_replay(x, dt, decay, B, state_HNP, mask, len(used) - 1)
