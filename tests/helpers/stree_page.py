"""The paper on one page: the tree scan of a Mamba-2 layer, and the activation replay after a verdict.

A layer has the state h and reads, for the node i of a token tree with parent p(i),

    h_i = e^{l_i} h_{p(i)} + dt_i x_i B_i^T         y_i = h_i C_i         l_i = dt_i A

The transitions are scalars, so they commute, and the state of a path is a sum over the path. With the tree mask L
(L_ij = 1 where j is i itself or an ancestor of i) and a = L l,

    y_i = e^{a_i} h_0 C_i + sum_j L_ij e^{a_i - a_j} dt_j (C_i . B_j) x_j                      tree scan

computes all nodes at once and stores no state of a node. It is the chunk formula of Mamba-2 with the mask L instead of
the causal mask. When the path to v is accepted, the inputs of its nodes give the new state:

    h = e^{a_v} h_0 + sum_j L_vj e^{a_v - a_j} dt_j x_j B_j^T                                  activation replay

Tests compare the implementations with this page: forward/ssm/scan.py (``walk``, ``tree_scan``, ``fold``, with
delta nets, too), forward/kernels/tree_scan.py (Triton) and the native decoder (native/ssm.inc).
:func:`by_the_page` has the arguments of scan.py.

Paper: Wu et al. 2025, arXiv:2505.14969, sections 4.2 (tree scan) and 4.3 (activation replay).

Letters: N nodes, H heads, P width of a head, G groups of heads that share B and C, S state size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.forward.ssm.scan import Rows


def tree_mask(parents: Sequence[int]) -> Tensor:
    """Return L, bool [N, N], of a tree; every parent (-1: none) comes before its children."""
    L_NN = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            L_NN[node] |= L_NN[parent]
    return L_NN


def tree_scan(
    x_NHP: Tensor, dt_NH: Tensor, l_NH: Tensor, B_NGS: Tensor, C_NGS: Tensor, h_HSP: Tensor, L_NN: Tensor
) -> Tensor:
    """Return y [N, H, P] of all nodes.

    Args:
        x_NHP, dt_NH, B_NGS, C_NGS: of the nodes, after convolution and softplus.
        l_NH: dt A, at most 0.
        h_HSP: h_0, the state before the tree.
        L_NN: tree mask.
    """
    B_NHS, C_NHS = (each.repeat_interleave(x_NHP.shape[1] // each.shape[1], dim=1) for each in (B_NGS, C_NGS))
    a_NH = L_NN.double() @ l_NH.double()  # float32 sums of long paths lose the digits of their differences
    # masked before the exponential: a_i - a_j of unrelated nodes may be large
    apart_NNH = (a_NH[:, None] - a_NH[None]).masked_fill(~L_NN[..., None], -torch.inf)
    weight_NNH = apart_NNH.exp().to(x_NHP.dtype) * torch.einsum("nhs,mhs->nmh", C_NHS, B_NHS) * dt_NH
    from_tree_NHP = torch.einsum("nmh,mhp->nhp", weight_NNH, x_NHP)
    from_state_NHP = torch.einsum("nhs,hsp->nhp", C_NHS, h_HSP) * a_NH.exp().to(x_NHP.dtype)[..., None]
    return from_tree_NHP + from_state_NHP


def activation_replay(
    x_NHP: Tensor, dt_NH: Tensor, l_NH: Tensor, B_NGS: Tensor, h_HSP: Tensor, L_NN: Tensor, v: int
) -> Tensor:
    """Return the state after the accepted path to node v, [H, S, P].

    Args:
        x_NHP, dt_NH, l_NH, B_NGS, h_HSP, L_NN: as for :func:`tree_scan`.
        v: the last accepted node.
    """
    B_NHS = B_NGS.repeat_interleave(x_NHP.shape[1] // B_NGS.shape[1], dim=1)
    a_NH = L_NN.double() @ l_NH.double()
    kept_NH = (a_NH[v] - a_NH).masked_fill(~L_NN[v, :, None], -torch.inf).exp().to(x_NHP.dtype)
    written_HSP = torch.einsum("nh,nhs,nhp->hsp", kept_NH * dt_NH, B_NHS, x_NHP)
    return a_NH[v].exp().to(x_NHP.dtype)[:, None, None] * h_HSP + written_HSP


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
