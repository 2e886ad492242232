"""Attention to the target's keys, and which blocks of them the deeper levels of a draft read.

    root           all P keys                weights, summed over the rows and over blocks of 32 positions
    deeper levels  the eighth of the blocks that weighs most, the first and the last one, and what is behind these

Ours: the published drafter reads all keys at every level, which at 8,192 positions is most of its time. A draft may be
approximate. The choice is each key/value head's own, and follows from one request alone.

Letters: R rows, H query heads, G key/value heads, F = R H / G rows over one of them, P keys, N blocks, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]  # [G, ., d] each

BLOCK = 32
SHARE = 8  # one block in so many is read
DENSE = 1024  # keys up to which all are


def attend(q_HRd: Tensor, far: KeysValues) -> tuple[Tensor, Tensor]:
    """[R, H d], and the weights [G, F, P].

    Written as products with the keys in front: for a few rows that is more than twice as fast as the library's kernel.
    """
    heads, rows, width = q_HRd.shape
    k_GPd, v_GPd = far
    q_GFd = (q_HRd * width**-0.5).reshape(len(k_GPd), -1, width)
    scores_GPF = k_GPd @ q_GFd.transpose(1, 2)
    weights_GFP = scores_GPF.transpose(1, 2).float().softmax(-1)
    found_GFd = weights_GFP.to(v_GPd.dtype) @ v_GPd
    return found_GFd.view(heads, rows, width).transpose(0, 1).flatten(1), weights_GFP


def chosen(weights_GFP: Tensor, far: KeysValues) -> KeysValues:
    """The keys and values that the levels behind this one read, in their order."""
    k_GPd, v_GPd = far
    groups, length, _ = k_GPd.shape
    if length <= DENSE:
        return far
    count = length // BLOCK
    whole = count * BLOCK
    mass_GN = weights_GFP[..., :whole].sum(1).unflatten(-1, (count, BLOCK)).sum(-1)
    mass_GN[:, [0, -1]] = torch.inf
    best_GK = mass_GN.topk(count // SHARE, dim=-1).indices.sort(-1).values
    group_G1 = torch.arange(groups, device=best_GK.device)[:, None]
    pieces = [
        torch.cat([part[:, :whole].unflatten(1, (count, BLOCK))[group_G1, best_GK].flatten(1, 2), part[:, whole:]], 1)
        for part in (k_GPd, v_GPd)
    ]
    return pieces[0], pieces[1]
