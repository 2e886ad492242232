"""Sparse attention on a GPU: one Triton kernel reads the kept blocks where they lie, a second one merges its parts.

    columns of a head   |sink|    |kept|    |local|local|rest|root n0 n1 …
    tiles                 0         1          2     3    4 …              a head's kept blocks, then all after them
    parts               |____ part 0 ____|____ part 1 ____|_ part 2 _|     each with its own softmax …

    … and one output:   o = sum over parts of 2^(s - S) o_part,     S = log2 of the sum of all 2^s

Nothing is gathered or copied. The query heads of a group are folded into rows (folded row f is row f % R of head f // R
of the group), so that a group's keys are read once for all of them; a program takes one key/value head, one tile of
folded rows and one part of the columns. Products are summed in float32; float32 inputs are not rounded to TF32.

Paper:   online softmax and its merge by log-sum-exp as in FlashAttention, arXiv:2205.14135, and its splitting of long
         prefixes for few rows ("flash decoding").
Differs: the columns are a list of blocks of each head, ragged where heads share a budget (methods/sparse/blocks.py).

This module needs Triton; methods/sparse/attention.py imports it only where there is any. With TRITON_INTERPRET=1 the
kernels run on CPU tensors, slowly: tests do that.

Letters: R rows, H query heads, G key/value heads, n = H / G, L columns, K kept blocks, D key width, Dv value width,
P parts; in the kernels M folded rows and C columns of a tile.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # rows and columns of a tile, at most …
_TILE_BYTES = 16384  # … and no more than fit so many bytes, so that tiles of keys, values and queries share a core
_MOST_PARTS = 32
_TILES_OF_A_PART = 4  # fewer are not worth a program of their own


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The kept blocks of each head, end to end.

    Attributes:
        blocks: int32, head after head.
        starts: int32 [G + 1]: where each head's begin, and the end of the last.
        longest: the most blocks of a head.
    """

    blocks: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, chosen: list[Tensor]) -> "BlockLists":
        """Of one list for each head (``BlockRule.select``)."""
        counts = [len(blocks) for blocks in chosen]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(torch.cat(chosen).to(torch.int32), starts.to(chosen[0].device), max(counts))


def attend(
    q_HRD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    lists: BlockLists,
    *,
    prefix: int,
    size: int,
    seen_RB: Tensor,
    scaling: float,
) -> Tensor:
    """Rows over the kept blocks, the columns after the last whole block, and the rows in flight: [R, H, Dv].

    Args:
        q_HRD, k_GLD, v_GLD: float32, bfloat16 or float16, any strides; the columns are those of the whole prefix and of
            the rows in flight.
        lists: kept blocks, all of them whole and inside the prefix.
        prefix: committed columns; L - prefix are in flight.
        size: columns of a block, a power of two from 16.
        seen_RB: int8 [R, L - prefix]: 1 where a row sees a column in flight; every row sees one at least.
        scaling: factor of the scores.
    """
    H, R, D = q_HRD.shape
    G, L, Dv = v_GLD.shape
    folded, in_flight = H // G * R, L - prefix
    width, width_v = (max(16, triton.next_power_of_2(each)) for each in (D, Dv))
    most = min(_TILE, max(16, _TILE_BYTES // (max(width, width_v) * q_HRD.element_size())))
    tile_rows = min(most, max(16, triton.next_power_of_2(folded)))
    tile_columns = min(most, size)
    tiles = lists.longest * (size // tile_columns) + triton.cdiv(prefix % size + in_flight, tile_columns)
    parts = min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(tiles, _TILES_OF_A_PART)))
    part_PHRD = q_HRD.new_empty((parts, H, R, Dv), dtype=torch.float32)
    sums_PHR = q_HRD.new_empty((parts, H, R), dtype=torch.float32)
    out_RHD = q_HRD.new_empty((R, H, Dv))
    with torch.cuda.device(q_HRD.device) if q_HRD.is_cuda else contextlib.nullcontext():
        _attend_part[(G, triton.cdiv(folded, tile_rows), parts)](
            q_HRD, k_GLD, v_GLD, lists.blocks, lists.starts, seen_RB, part_PHRD, sums_PHR,
            *q_HRD.stride(), *k_GLD.stride(), *v_GLD.stride(),
            R, H // G, prefix, in_flight, scaling * math.log2(math.e),
            D=D, DV=Dv, SIZE=size, ROWS=tile_rows, COLUMNS=tile_columns, WIDTH=width, WIDTH_V=width_v,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        _merge[(H * R,)](part_PHRD, sums_PHR, out_RHD, R, H, PARTS=parts, DV=Dv, WIDTH_V=width_v, num_warps=1)
    return out_RHD


@triton.jit(do_not_specialize=["num_rows", "repeats", "prefix", "in_flight"])
def _attend_part(
    q, k, v, blocks, starts, seen, part, sums,
    q_h, q_r, q_d, k_g, k_l, k_d, v_g, v_l, v_d,
    num_rows, repeats, prefix, in_flight, scale,
    D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """One part of a head's tiles for one tile of folded rows: the output of this part alone, and log2 of its sum."""
    g = tl.program_id(0).to(tl.int64)  # a head's keys may lie more than 2^31 elements after the first
    fold_M = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(2)
    is_row_M = fold_M < repeats * num_rows
    head_M = g * repeats + fold_M // num_rows
    row_M = fold_M % num_rows
    d = tl.arange(0, WIDTH)
    dv = tl.arange(0, WIDTH_V)
    q_MD = tl.load(
        q + head_M[:, None] * q_h + row_M[:, None] * q_r + d[None, :] * q_d,
        mask=is_row_M[:, None] & (d < D)[None, :],
        other=0.0,
    )

    per_block: tl.constexpr = SIZE // COLUMNS
    whole = prefix // SIZE * SIZE
    start = tl.load(starts + g)
    num_kept = (tl.load(starts + g + 1) - start) * per_block
    num_tiles = num_kept + tl.cdiv(prefix - whole + in_flight, COLUMNS)
    each = tl.cdiv(num_tiles, tl.num_programs(2))

    top_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    out_MD = tl.zeros([ROWS, WIDTH_V], tl.float32)
    for tile in range(number * each, tl.minimum(number * each + each, num_tiles)):
        kept = tile < num_kept
        block = tl.load(blocks + start + tile // per_block, mask=kept, other=0)
        first = tl.where(kept, block * SIZE + tile % per_block * COLUMNS, whole + (tile - num_kept) * COLUMNS)
        column_C = first + tl.arange(0, COLUMNS)
        inside_C = column_C < prefix + in_flight
        flight_C = column_C - prefix
        seen_MC = tl.load(
            seen + row_M[:, None] * in_flight + flight_C[None, :],
            mask=((flight_C >= 0) & inside_C)[None, :] & is_row_M[:, None],
            other=0,
        )
        sees_MC = (flight_C < 0)[None, :] | (seen_MC != 0)
        k_CD = tl.load(
            k + g * k_g + column_C[:, None] * k_l + d[None, :] * k_d,
            mask=inside_C[:, None] & (d < D)[None, :],
            other=0.0,
        )
        v_CD = tl.load(
            v + g * v_g + column_C[:, None] * v_l + dv[None, :] * v_d,
            mask=inside_C[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        score_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision="ieee") * scale
        score_MC = tl.where(sees_MC, score_MC, float("-inf"))
        new_M = tl.maximum(top_M, tl.max(score_MC, 1))
        shift_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # a row may see nothing of this part
        weight_MC = tl.exp2(score_MC - shift_M[:, None])
        old_M = tl.exp2(top_M - shift_M)
        sum_M = sum_M * old_M + tl.sum(weight_MC, 1)
        out_MD = out_MD * old_M[:, None] + tl.dot(weight_MC.to(v_CD.dtype), v_CD, input_precision="ieee")
        top_M = new_M

    empty_M = sum_M == 0.0
    out_MD = out_MD / tl.where(empty_M, 1.0, sum_M)[:, None]
    log_M = tl.where(empty_M, float("-inf"), top_M + tl.log2(tl.where(empty_M, 1.0, sum_M)))
    place_M = number * (tl.num_programs(0) * repeats * num_rows) + head_M * num_rows + row_M
    tl.store(sums + place_M, log_M, mask=is_row_M)
    tl.store(part + place_M[:, None] * DV + dv[None, :], out_MD, mask=is_row_M[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _merge(part, sums, out, num_rows, num_heads, PARTS: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr):
    """One row of one head: the parts' outputs, weighted by their share of the softmax's sum."""
    place = tl.program_id(0)
    head = place // num_rows
    row = place % num_rows
    dv = tl.arange(0, WIDTH_V)
    place_P = tl.arange(0, PARTS) * (num_heads * num_rows) + place
    log_P = tl.load(sums + place_P)
    weight_P = tl.exp2(log_P - tl.max(log_P, 0))
    part_PD = tl.load(part + place_P[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
    out_D = tl.sum(part_PD * weight_P[:, None], 0) / tl.sum(weight_P, 0)
    tl.store(out + (row * num_heads + head) * DV + dv, out_D.to(out.dtype.element_ty), mask=dv < DV)
