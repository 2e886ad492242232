"""The tree scan of a state-space layer on a GPU: one Triton kernel, whatever the tree.

    rows i      y_i = e^{a_i} S_0^T q_i + sum over ancestors j and i itself of e^{a_i - a_j} (q_i . k_j) u_j
    tile i      loops over the tiles of rows j up to its own: a parent comes before its children

A program takes one head, one tile of rows and one tile of the value's width. Neither the mask of ancestors nor the
decays between rows are ever held as a matrix of all rows and heads. Products are summed in float32 and not rounded to
TF32.

Paper:   Wu et al. 2025, arXiv:2505.14969, section 4.2; definition and difference of sums: forward/ssm/scan.py.
Differs: a sum of logarithms comes as two float32 numbers, so that a difference of two keeps its digits without float64
         units. A delta net's rows need a triangular solve first and are not computed here.

This module needs Triton; forward/ssm/scan.py imports it only where there is any. With TRITON_INTERPRET=1 the kernel
runs on CPU tensors, slowly: tests do that.

Letters: T rows, H heads, G groups, N state size, P head width; in the kernel I rows of a tile, J rows that they see, W
columns of a tile of P.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 32, 32  # of a tile
_LEAST = 16  # of each side of a product


def tree_scan(state_HNP: Tensor, k_TGN: Tensor, q_TGN: Tensor, u_THP: Tensor, a_TH: Tensor, seen_TT: Tensor) -> Tensor:
    """y [T, H, P] of all rows of a tree.

    Args:
        state_HNP: the state before the root, float32, as k, q and u (b v) are.
        a_TH: sums of log-decays along each row's path, float64.
        seen_TT: bool; of each row its ancestors and itself, none of which stands after it.
    """
    T, H, P = u_THP.shape
    G, N = k_TGN.shape[1:]
    high_TH = a_TH.float()
    low_TH = (a_TH - high_TH).float()
    out_THP = torch.empty_like(u_THP, memory_format=torch.contiguous_format)
    width = max(_LEAST, min(_COLUMNS, triton.next_power_of_2(P)))
    parts = [each.contiguous() for each in (state_HNP, k_TGN, q_TGN, u_THP, high_TH, low_TH, seen_TT.to(torch.int8))]
    device = torch.cuda.device(u_THP.device) if u_THP.is_cuda else contextlib.nullcontext()
    with device:
        _scan[(H, triton.cdiv(T, _ROWS), triton.cdiv(P, width))](
            *parts, out_THP, H // G, T, H, N, P, _ROWS, max(_LEAST, triton.next_power_of_2(N)), width
        )
    return out_THP


@triton.jit(do_not_specialize=["repeats", "num_rows", "num_heads"])
def _scan(
    state, k, q, u, high, low, seen, out, repeats, num_rows, num_heads,
    N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WIDTH_N: tl.constexpr, WIDTH_P: tl.constexpr,
):  # fmt: skip
    """One tile of rows and of a value's width, of one head."""
    h = tl.program_id(0)
    g = h // repeats
    groups = num_heads // repeats
    i_I = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    p_W = tl.program_id(2) * WIDTH_P + tl.arange(0, WIDTH_P)
    n = tl.arange(0, WIDTH_N)
    is_row_I, is_column_W, is_state = i_I < num_rows, p_W < P, n < N
    q_IN = tl.load(
        q + (i_I[:, None] * groups + g) * N + n[None, :], mask=is_row_I[:, None] & is_state[None, :], other=0.0
    )
    high_I = tl.load(high + i_I * num_heads + h, mask=is_row_I, other=0.0)
    low_I = tl.load(low + i_I * num_heads + h, mask=is_row_I, other=0.0)
    state_NW = tl.load(
        state + (h * N + n[:, None]) * P + p_W[None, :], mask=is_state[:, None] & is_column_W[None, :], other=0.0
    )
    y_IW = tl.exp(high_I + low_I)[:, None] * tl.dot(q_IN, state_NW, input_precision="ieee")
    for tile in range(tl.program_id(1) + 1):
        j_J = tile * ROWS + tl.arange(0, ROWS)
        is_row_J = j_J < num_rows
        k_JN = tl.load(
            k + (j_J[:, None] * groups + g) * N + n[None, :], mask=is_row_J[:, None] & is_state[None, :], other=0.0
        )
        u_JW = tl.load(
            u + (j_J[:, None] * num_heads + h) * P + p_W[None, :],
            mask=is_row_J[:, None] & is_column_W[None, :],
            other=0.0,
        )
        high_J = tl.load(high + j_J * num_heads + h, mask=is_row_J, other=0.0)
        low_J = tl.load(low + j_J * num_heads + h, mask=is_row_J, other=0.0)
        sees_IJ = tl.load(
            seen + i_I[:, None] * num_rows + j_J[None, :], mask=is_row_I[:, None] & is_row_J[None, :], other=0
        )
        apart_IJ = (high_I[:, None] - high_J[None, :]) + (low_I[:, None] - low_J[None, :])
        lasting_IJ = tl.exp(tl.where(sees_IJ != 0, apart_IJ, float("-inf")))
        score_IJ = tl.dot(q_IN, tl.trans(k_JN), input_precision="ieee") * lasting_IJ
        y_IW += tl.dot(score_IJ, u_JW, input_precision="ieee")
    tl.store(
        out + (i_I[:, None] * num_heads + h) * P + p_W[None, :], y_IW, mask=is_row_I[:, None] & is_column_W[None, :]
    )
