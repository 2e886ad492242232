"""What serving computes while it drafts, from many pairs at once: the training-time test.

    column i of step s     reads what followed from its own output of step s - 1, and x_{i+1+s}, at position i + s;
                           in every layer it sees the pairs <= i as the target's features made them, and itself at
                           steps 1..s

Columns are computed where somebody asks; the others are keys and values of the first step only. The rows of all
sequences lie behind each other, as what is asked has another length in each of them.

Paper: EAGLE-3, arXiv:2503.01840, section 3.2 and figure 6.

Letters: B sequences, T positions, C = T - 1 columns, N columns that are asked about, F width of the target's states, W
width, V vocabulary, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.drafting.feature_heads.column_attention import columns_attend
from foretoken.drafting.feature_heads.head import FeatureHead

Unroll = Callable[[Any, Tensor, Tensor, Tensor, int, Tensor], Iterator[Tensor]]  # as :func:`unrolled`, of any head


def every_column(tokens_BT: Tensor) -> Tensor:
    """All of them: bool [B, C]."""
    return torch.ones(len(tokens_BT), tokens_BT.shape[1] - 1, dtype=torch.bool, device=tokens_BT.device)


def unrolled(
    head: FeatureHead, states_BTF: Tensor, tokens_BT: Tensor, embedding_VW: Tensor, steps: int, wanted_BC: Tensor
) -> Iterator[Tensor]:
    """Run ``steps`` tokens deep from every pair that is asked about.

    Args:
        states_BTF: the target's states of rows 0..T-1, the depths side by side.
        tokens_BT: x_0..x_{T-1}.
        embedding_VW: see :meth:`FeatureHead.embedding_of`.
        steps: S.
        wanted_BC: bool, the columns that are asked about.
    Returns:
        for s = 0, 1, ..: what the head reads for the columns that are asked about, [N, W], sequence by sequence; it
        predicts x_{i+2+s}. Where x_{i+1+s} is not there, the row says nothing.
    """
    length = tokens_BT.shape[1] - 1
    cos_Td, sin_Td = head.rotary_at(torch.arange(length + steps, device=tokens_BT.device))
    e_BTW = F.embedding(tokens_BT, embedding_VW)
    seen = [Seen(head.config.head_dim**-0.5) for _ in head.layers]
    last = len(seen) - 1
    sequence_N, column_N = wanted_BC.nonzero(as_tuple=True)
    read, residual = head.open(head.fuse(states_BTF[:, :length]), e_BTW[:, 1:])
    for number, layer in enumerate(seen):
        if number:
            read, residual = head.go_on(number, residual)
        q, k, v = head.project(read, cos_Td[:length], sin_Td[:length], number)
        # of a layer below the last, everything is seen by the next one
        places_BC = wanted_BC if number == last else torch.ones_like(wanted_BC)
        rows = layer.first(q.transpose(1, 2)[places_BC].transpose(0, 1), k, v, places_BC)
        residual = head.close(residual[places_BC], rows.transpose(0, 1).flatten(1), number)
        if number < last:
            residual = residual.unflatten(0, places_BC.shape)
            layer.ask(wanted_BC)
    h_NW = residual
    yield head.read_out(h_NW)
    for step in range(1, min(steps, length)):
        at_N = column_N + step
        token_N = (at_N + 1).clamp_max(length)
        read, residual = head.open(head.following(h_NW), e_BTW[sequence_N, token_N])
        for number, layer in enumerate(seen):
            if number:
                read, residual = head.go_on(number, h_NW)
            q, k, v = head.project(read, cos_Td[at_N], sin_Td[at_N], number)
            h_NW = head.close(residual, layer.later(q, k, v).transpose(0, 1).flatten(1), number)
        yield head.read_out(h_NW)


class Seen:
    """What one layer has seen: the first step's pairs, and each column's own later steps.

    Args:
        scaling: of the scores.
    """

    def __init__(self, scaling: float) -> None:
        self._scaling = scaling
        self._first: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []
        self._columns: list[Tensor] = []  # of each sequence, those that ask

    def first(self, q_HNd: Tensor, k_BGCd: Tensor, v_BGCd: Tensor, asked_BC: Tensor) -> Tensor:
        """[H, N, d] of the first step's queries, those of the columns that are asked about."""
        self._first = k_BGCd, v_BGCd
        self.ask(asked_BC)
        return self._attend(q_HNd)

    def ask(self, asked_BC: Tensor) -> None:
        """From the next step on these columns ask."""
        self._columns = [each.nonzero()[:, 0] for each in asked_BC]

    def later(self, q_HNd: Tensor, k_GNd: Tensor, v_GNd: Tensor) -> Tensor:
        """[H, N, d] of a later step's queries; keys and values are each column's own."""
        self._own.append((k_GNd, v_GNd))
        return self._attend(q_HNd)

    def _attend(self, q_HNd: Tensor) -> Tensor:
        assert self._first is not None
        own_k, own_v = ([each[place] for each in self._own] for place in (0, 1))
        found, begin = [], 0
        for k_GCd, v_GCd, column_n in zip(*self._first, self._columns, strict=True):
            if not len(column_n):
                continue
            rows = slice(begin, begin + len(column_n))
            begin += len(column_n)
            own = [torch.stack([each[:, rows] for each in side], 2) for side in (own_k, own_v)] if own_k else []
            found.append(columns_attend(q_HNd[:, rows], k_GCd, v_GCd, column_n, self._scaling, *own))
        return torch.cat(found, dim=1) if found else q_HNd.new_zeros(len(q_HNd), 0, self._first[1].shape[-1])
