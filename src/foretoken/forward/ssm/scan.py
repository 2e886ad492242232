"""The recurrence of a state-space layer over a tree, three ways: node by node, all at once, and a chain in chunks.

A row has a key k, a query q, a value v, the logarithm l <= 0 of the decay of the state, and a factor b. With the state
S of its parent:

    Mamba-2     S <- e^l S + k (b v)^T                        y = S^T q        k = B, q = C, v = x, b = dt, l = dt A
    delta net   S <- e^l S + k (b (v - e^l S^T k))^T          y = S^T q        l = log alpha, b = beta

``walk`` is this recurrence, depth first: its result for a row does not depend on the rest of the tree.
``tree_scan`` computes all rows at once. Let a_i be the sum of l over a row's path; then, with S_0 the state before
the root,

    u_i = b_i (v_i - [delta net] (e^{a_i} S_0^T k_i + sum over strict ancestors j of e^{a_i - a_j} (k_i . k_j) u_j))
    y_i = e^{a_i} S_0^T q_i + sum over ancestors j and i itself of e^{a_i - a_j} (q_i . k_j) u_j

and the state after a path is e^{a_v} S_0 + sum over its rows of e^{a_v - a_j} k_j u_j^T (``fold``).

Paper:   Wu et al. 2025, arXiv:2505.14969, section 4 (tree scan: the mask of ancestors in the place of the causal one);
         Dao and Gu 2024, arXiv:2405.21060, section 6 (chunks); arXiv:2608.20961 (the triangular solve of a delta net).
Differs: sums of l are taken parent by parent in float64, differences are rounded afterwards: over a long path sums in
         float32 lose the digits that differences need. Exponents are masked before they are taken, never after.

Letters: T rows, H heads (of values), G groups of heads that share k and q, N state size of a key, P width of a value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.forward.kernels import loading

CHUNK_ROWS = 64


class Rows(NamedTuple):
    """The rows' inputs of the recurrence, all of one floating dtype, float32 or wider.

    Attributes:
        k_TGN, q_TGN, v_THP, decay_TH, factor_TH: k, q, v, l and b above. Of Mamba-1 l is a vector, [T, H, N], and rows
            are computed one by one.
        delta: whether a row writes the difference between its value and the state's (a delta net).
    """

    k_TGN: Tensor
    q_TGN: Tensor
    v_THP: Tensor
    decay_TH: Tensor
    factor_TH: Tensor
    delta: bool

    def of(self, rows: Sequence[int] | slice) -> "Rows":
        """Select some of the rows."""
        index = rows if isinstance(rows, slice) else list(rows)
        k, q, v, decay, factor, delta = self
        return Rows(k[index], q[index], v[index], decay[index], factor[index], delta)

    def __len__(self) -> int:
        return len(self.k_TGN)


def chain_of(num_rows: int) -> list[int]:
    """Return the parents of a chain."""
    return list(range(-1, num_rows - 1))


def walk(state_HNP: Tensor, rows: Rows, parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute the recurrence row by row.

    Args:
        state_HNP: the state before the root; not changed.
        rows: T of them, a parent before its children.
        parents: of each row; -1: it follows ``state_HNP``; -2: it is ignored, and its output is 0.
    Returns:
        y [T, H, P], and the state after the last row that is not ignored.
    """
    heads, groups = rows.v_THP.shape[1], rows.k_TGN.shape[1]
    k_THN1 = rows.k_TGN.repeat_interleave(heads // groups, 1)[..., None]
    q_THN1 = rows.q_TGN.repeat_interleave(heads // groups, 1)[..., None]
    kept_TH11 = rows.decay_TH.view(*rows.decay_TH.shape[:2], -1, 1).exp()
    factor_TH1 = rows.factor_TH[..., None]
    y_THP = torch.zeros_like(rows.v_THP)
    last_child = {parent: row for row, parent in enumerate(parents)}
    states = {-1: state_HNP}
    for row, parent in enumerate(parents):
        if parent == -2:
            continue
        before = states[parent]
        if last_child[parent] == row:  # no later row continues from there
            del states[parent]
        after = before * kept_TH11[row]
        u_HP = rows.v_THP[row]
        if rows.delta:
            u_HP = u_HP - (after * k_THN1[row]).sum(1)
        after = after + k_THN1[row] * (factor_TH1[row] * u_HP)[:, None]
        y_THP[row] = (after * q_THN1[row]).sum(1)
        state_HNP = after
        if row in last_child:
            states[row] = after
    return y_THP, state_HNP


def tree_scan(state_HNP: Tensor, rows: Rows, parents: Sequence[int]) -> Tensor:
    """Compute all rows of a tree at once, y [T, H, P]; arguments as for :func:`walk`. Uses Triton if it can."""
    if rows.decay_TH.dim() > 2:
        return walk(state_HNP, rows, parents)[0]
    a_HT = _path_sums(rows.decay_TH, parents).T
    seen_TT = _ancestors(parents).to(a_HT.device)
    unseen_T11 = (torch.tensor(parents) == -2).to(a_HT.device)[:, None, None]
    kernel = loading.kernel(a_HT.device.type, "tree_scan")
    if kernel is not None and not rows.delta and rows.v_THP.dtype == torch.float32:
        u_THP = rows.factor_TH[..., None] * rows.v_THP
        y_THP: Tensor = kernel.tree_scan(state_HNP, rows.k_TGN, rows.q_TGN, u_THP, a_HT.T, seen_TT)
        return y_THP.masked_fill(unseen_T11, 0.0)
    u_HTP = _written(state_HNP, rows, a_HT, seen_TT)
    lasting_HTT = _lasting(a_HT, seen_TT, rows.decay_TH.dtype)
    scores_HTT = _products(rows.q_TGN, rows.k_TGN, rows.v_THP.shape[1]) * lasting_HTT
    q_HTN = _by_head(rows.q_TGN, rows.v_THP.shape[1])
    y_HTP = scores_HTT @ u_HTP + a_HT.to(q_HTN.dtype).exp()[..., None] * (q_HTN @ state_HNP)
    return y_HTP.transpose(0, 1).masked_fill(unseen_T11, 0.0)


def fold(state_HNP: Tensor, rows: Rows) -> Tensor:
    """Return the state after a chain of rows, in closed form: activation replay from a path's inputs."""
    if not len(rows):
        return state_HNP
    parents = chain_of(len(rows))
    if rows.decay_TH.dim() > 2:
        return walk(state_HNP, rows, parents)[1]
    a_HT = _path_sums(rows.decay_TH, parents).T
    u_HTP = _written(state_HNP, rows, a_HT, _ancestors(parents).to(a_HT.device))
    late_HT = (a_HT[:, -1:] - a_HT).to(u_HTP.dtype).exp()
    k_HTN = _by_head(rows.k_TGN, rows.v_THP.shape[1])
    left_H11 = a_HT[:, -1].to(u_HTP.dtype).exp()[:, None, None]
    return left_H11 * state_HNP + (k_HTN * late_HT[..., None]).transpose(1, 2) @ u_HTP


def chunk_scan(state_HNP: Tensor, rows: Rows, size: int = CHUNK_ROWS) -> tuple[Tensor, Tensor]:
    """Compute a chain, ``size`` rows at a time: y [T, H, P] and the state after it."""
    if rows.decay_TH.dim() > 2:
        return walk(state_HNP, rows, chain_of(len(rows)))
    outputs = []
    for start in range(0, len(rows), size):
        part = rows.of(slice(start, start + size))
        outputs.append(tree_scan(state_HNP, part, chain_of(len(part))))
        state_HNP = fold(state_HNP, part)
    return torch.cat(outputs) if outputs else rows.v_THP.clone(), state_HNP


def _path_sums(decay_TH: Tensor, parents: Sequence[int]) -> Tensor:
    """a, float64 [T, H]."""
    sums: list[Tensor] = []
    for row, parent in enumerate(parents):
        own = decay_TH[row].double()
        sums.append(sums[parent] + own if parent >= 0 else own)
    return torch.stack(sums)


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Tree mask, bool [T, T]: of each row its ancestors and itself."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row] = True
    return seen


def _lasting(a_HT: Tensor, seen_TT: Tensor, dtype: torch.dtype) -> Tensor:
    """Decay from row j to row i: e^{a_i - a_j} for ancestors j, else 0; [H, T, T]."""
    apart_HTT = (a_HT[:, :, None] - a_HT[:, None, :]).masked_fill(~seen_TT, -torch.inf)
    return apart_HTT.to(dtype).exp()


def _by_head(x_TGN: Tensor, heads: int) -> Tensor:
    return x_TGN.repeat_interleave(heads // x_TGN.shape[1], 1).transpose(0, 1)


def _products(x_TGN: Tensor, y_TGN: Tensor, heads: int) -> Tensor:
    """x_i . y_j of every head: [H, T, T]."""
    pairs_GTT = x_TGN.transpose(0, 1) @ y_TGN.permute(1, 2, 0)
    return pairs_GTT.repeat_interleave(heads // x_TGN.shape[1], 0)


def _written(state_HNP: Tensor, rows: Rows, a_HT: Tensor, seen_TT: Tensor) -> Tensor:
    """u of every row, [H, T, P]; for a delta net one triangular solve over the ancestors."""
    v_HTP = rows.v_THP.transpose(0, 1)
    factor_HT1 = rows.factor_TH.T[..., None]
    if not rows.delta:
        return factor_HT1 * v_HTP
    heads = v_HTP.shape[0]
    k_HTN = _by_head(rows.k_TGN, heads)
    strict_TT = seen_TT & ~torch.eye(len(rows), dtype=torch.bool, device=seen_TT.device)
    mixing_HTT = factor_HT1 * _products(rows.k_TGN, rows.k_TGN, heads) * _lasting(a_HT, strict_TT, v_HTP.dtype)
    known_HTP = a_HT.to(v_HTP.dtype).exp()[..., None] * (k_HTN @ state_HNP)
    return torch.linalg.solve_triangular(mixing_HTT, factor_HT1 * (v_HTP - known_HTP), upper=False, unitriangular=True)
