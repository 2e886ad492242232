"""Attention of some columns of one sequence over the pairs up to theirs, and over each column's own states.

    scores    S = s [Q K', Q . own K]   -inf where a pair is later than the column
    forward   P = softmax(S)    O = P_first V + sum over own steps of p own V
    backward  dP = [dO V', dO . own V]    dS = P (dP - rowsum(P dP))    and the six products of attention

With a backward pass of its own: all scores are written once into one buffer, and only P is kept.

Letters: N columns that ask, C columns, H query heads, G key/value heads, R = H/G, s own steps, d width of a head.
"""

from typing import Any

import torch
from torch import Tensor


class _ColumnAttention(torch.autograd.Function):
    """Of the queries that share keys, [G, N R, d]: by column, the R queries of one column adjacent."""

    @staticmethod
    def forward(
        ctx: Any,
        q_GLd: Tensor,
        k_GCd: Tensor,
        v_GCd: Tensor,
        later_LC: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
    ) -> Tensor:
        groups, length, _ = q_GLd.shape
        count, steps = k_GCd.shape[1], 0 if own_k is None else own_k.shape[2]
        scores = q_GLd.new_empty(groups, length, count + steps)
        torch.baddbmm(later_LC.expand(groups, -1, -1), q_GLd, k_GCd.transpose(1, 2), out=scores[..., :count])
        if own_k is not None:
            scores[..., count:] = _beside(q_GLd, own_k)
        p = torch.softmax(scores, dim=-1)
        out_GLd = p[..., :count] @ v_GCd
        if own_v is not None:
            out_GLd += _mixed(p[..., count:], own_v)
        ctx.save_for_backward(q_GLd, k_GCd, v_GCd, p, own_k, own_v)
        return out_GLd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_GLd, k_GCd, v_GCd, p, own_k, own_v = ctx.saved_tensors
        grad_GLd, count = grads[0].contiguous(), k_GCd.shape[1]
        d_p = torch.empty_like(p)
        torch.bmm(grad_GLd, v_GCd.transpose(1, 2), out=d_p[..., :count])
        if own_v is not None:
            d_p[..., count:] = _beside(grad_GLd, own_v)
        d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        first, own = d_scores[..., :count], d_scores[..., count:]
        d_q = first @ k_GCd
        d_k = first.transpose(1, 2) @ q_GLd
        d_v = p[..., :count].transpose(1, 2) @ grad_GLd
        if own_k is None or own_v is None:
            return d_q, d_k, d_v, None, None, None
        d_q += _mixed(own, own_k)
        return d_q, d_k, d_v, None, _shared(own, q_GLd, own_k), _shared(p[..., count:], grad_GLd, own_v)


def _beside(x_GLd: Tensor, own_GNsd: Tensor) -> Tensor:
    """Each query with its column's own steps: [G, L, s]."""
    groups, count, steps, width = own_GNsd.shape
    x = x_GLd.view(groups * count, -1, width)
    return (x @ own_GNsd.view(groups * count, steps, width).transpose(1, 2)).view(groups, -1, steps)


def _mixed(weights_GLs: Tensor, own_GNsd: Tensor) -> Tensor:
    """The own steps, weighted: [G, L, d]."""
    groups, count, steps, width = own_GNsd.shape
    weights = weights_GLs.reshape(groups * count, -1, steps)
    return (weights @ own_GNsd.view(groups * count, steps, width)).view(groups, -1, width)


def _shared(weights_GLs: Tensor, x_GLd: Tensor, own_GNsd: Tensor) -> Tensor:
    """Gradient of the own steps: the sum over the R queries of each column, [G, N, s, d]."""
    groups, count, steps, width = own_GNsd.shape
    weights = weights_GLs.reshape(groups * count, -1, steps)
    return (weights.transpose(1, 2) @ x_GLd.view(groups * count, -1, width)).view(own_GNsd.shape)


def columns_attend(
    q_HNd: Tensor,
    k_GCd: Tensor,
    v_GCd: Tensor,
    column_N: Tensor,
    scaling: float,
    own_k_GNsd: Tensor | None = None,
    own_v_GNsd: Tensor | None = None,
) -> Tensor:
    """``softmax(scaling S)``-weighted values, [H, N, d], with a gradient for queries, keys and values.

    Args:
        q_HNd: of the columns that ask; all of one dtype.
        k_GCd, v_GCd: of the first step; values may be wider or narrower than keys.
        column_N: int64, which columns ask.
        own_k_GNsd, own_v_GNsd: of the asking columns' own later steps; None: there is none yet.
    """
    heads, count, width = q_HNd.shape
    groups = len(k_GCd)
    q_GLd = (q_HNd * scaling).view(groups, -1, count, width).transpose(1, 2).reshape(groups, -1, width)
    columns_C = torch.arange(k_GCd.shape[1], device=q_HNd.device)
    later_NC = q_HNd.new_zeros(count, len(columns_C)).masked_fill_(columns_C > column_N[:, None], float("-inf"))
    later_LC = later_NC.repeat_interleave(heads // groups, 0)
    out_GLd = _ColumnAttention.apply(q_GLd, k_GCd.contiguous(), v_GCd.contiguous(), later_LC, own_k_GNsd, own_v_GNsd)
    return out_GLd.view(groups, count, heads // groups, -1).transpose(1, 2).reshape(heads, count, -1)
