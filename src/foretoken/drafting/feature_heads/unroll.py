"""What serving computes while it drafts, from every pair at once: the training-time test.

    column i of step s     reads what followed from its own output of step s - 1, and x_{i+1+s}, at position i + s;
                           in every layer it sees the pairs <= i as the target's features made them, and itself at
                           steps 1..s

Paper: EAGLE-3, arXiv:2503.01840, section 3.2 and figure 6.

Letters: B sequences, T positions, F width of the target's states, W width, V vocabulary, H query heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.drafting.feature_heads.head import FeatureHead

Unroll = Callable[[Any, Tensor, Tensor, Tensor, int], Iterator[Tensor]]  # as :func:`unrolled`, of any head


def unrolled(
    head: FeatureHead, states_BTF: Tensor, tokens_BT: Tensor, embedding_VW: Tensor, steps: int
) -> Iterator[Tensor]:
    """Run ``steps`` tokens deep from every pair.

    Args:
        states_BTF: the target's states of rows 0..T-1, the depths side by side.
        tokens_BT: x_0..x_{T-1}.
        embedding_VW: see :meth:`FeatureHead.embedding_of`.
        steps: S.
    Returns:
        for s = 0, 1, ..: what the head reads for columns 0..T-2-s, [B, T-1-s, W]; it predicts x_{i+2+s}.
    """
    length = tokens_BT.shape[1] - 1
    cos_Td, sin_Td = head.rotary_at(torch.arange(length + steps, device=tokens_BT.device))
    e_BTW = F.embedding(tokens_BT, embedding_VW)
    g = head.fuse(states_BTF[:, :length])
    seen = [Seen(head.config.head_dim**-0.5, head.config.heads // head.config.kv_heads) for _ in head.layers]
    for step in range(min(steps, length)):
        count = length - step  # columns whose token is known
        read, residual = head.open(g[:, :count], e_BTW[:, 1 + step : 1 + step + count])
        h = residual
        for number, layer in enumerate(seen):
            if number:
                read, residual = head.go_on(number, h)
            q, k, v = head.project(read, cos_Td[step : step + count], sin_Td[step : step + count], number)
            h = head.close(residual, layer.attend(q, k, v).transpose(1, 2).flatten(2), number)
        yield head.read_out(h)
        g = head.following(h)


class Seen:
    """What one layer has seen: the first step's pairs, and each column's own later steps.

    Args:
        scaling: of the scores.
        group: query heads of each key/value head.
    """

    def __init__(self, scaling: float, group: int) -> None:
        self._scaling, self._group = scaling, group
        self._first: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []

    def attend(self, q_BHTd: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, d] of the next step's queries; its keys and values are kept."""
        if self._first is None:
            self._first = k, v
            return F.scaled_dot_product_attention(
                q_BHTd, k, v, is_causal=True, enable_gqa=self._group > 1, scale=self._scaling
            )
        count = q_BHTd.shape[2]
        self._own = [(each_k[:, :, :count], each_v[:, :, :count]) for each_k, each_v in (*self._own, (k, v))]
        k, v = (each[:, :, :count].repeat_interleave(self._group, 1) for each in self._first)
        seen_TT = torch.ones(count, count, dtype=torch.bool, device=q_BHTd.device).tril()
        scores = (q_BHTd @ k.transpose(-1, -2) * self._scaling).masked_fill(~seen_TT, -torch.inf)
        wide = [[each.repeat_interleave(self._group, 1) for each in pair] for pair in self._own]
        beside = [(q_BHTd * each_k).sum(-1, keepdim=True) * self._scaling for each_k, _ in wide]
        weights = torch.cat([scores, *beside], dim=-1).softmax(-1)
        out = weights[..., :count] @ v
        for place, (_, each_v) in enumerate(wide):
            out = out + weights[..., count + place, None] * each_v
        return out
