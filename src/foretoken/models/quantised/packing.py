"""Codes that lie side by side in 32-bit words, and integers with a zero point: shared by the formats.

Letters: O outputs, K inputs, G groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight


def unpacked(words: Tensor, bits: int, *, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """The codes in 32-bit words, uint8.

    Args:
        words: int32 [R, C].
        bits: 8 or 4 of each code.
        dim: along which a word's codes follow each other, 0 or 1.
        order: ``order[i]`` is the place within a word, counted from its lowest bits, of code i; None: i.
    Returns:
        32 / bits times as long in that dimension.
    """
    rows, columns = words.shape
    count = 32 // bits
    codes = torch.empty((rows, columns, count) if dim else (rows, count, columns), dtype=torch.uint8)
    for code, place in enumerate(range(count) if order is None else order):  # at once, they take 32 bits each
        codes.select(dim + 1, code).copy_(words >> bits * place & (2**bits - 1))
    return codes.flatten(dim, dim + 1)


def with_zeros(
    codes_OK: Tensor, zeros_OG: Tensor | None, scales_OG: Tensor, bits: int, *, order_K: Tensor | None, name: str
) -> QuantisedWeight:
    """scale (code - zero), exactly as float32 has it.

    Where scale times code and scale times zero are exact in float32, as they are for scales of float16 and bfloat16,
    their difference is, too. Other scales need the difference first, which takes 8 bits.

    Args:
        codes_OK: uint8.
        zeros_OG: whole numbers from 0 to 2**bits; None: the middle, 2**(bits - 1).
        scales_OG: floating.
        order_K: of the columns, as in :class:`QuantisedWeight`.
    Raises:
        ModelError: 8 bits with scales of float32 and zeros far from the middle, which no code of 8 bits holds; or see
            :class:`QuantisedWeight`.
    """
    scales_OG = scales_OG.float().contiguous()
    middle = 2 ** (bits - 1)
    if zeros_OG is None or bool((zeros_OG == middle).all()):
        return QuantisedWeight((codes_OK.short() - middle).to(torch.int8), scales_OG, None, bits, order_K, name)
    if bool(((scales_OG.view(torch.int32) & 0x1FFF) == 0).all()):  # 11 bits and the 9 of a zero: 20 of float32's 24
        return QuantisedWeight(codes_OK, scales_OG, -(scales_OG * zeros_OG), bits, order_K, name)
    group = codes_OK.shape[1] // scales_OG.shape[1]
    apart_OK = codes_OK.short() - zeros_OG.short().repeat_interleave(group, dim=1)
    if int(apart_OK.min()) < -128 or int(apart_OK.max()) > 127:
        raise ModelError(
            f"the quantised tensor '{name}' has zero points, and scales of float32 that no shorter format holds; in 8 "
            "bits such a weight is not read"
        )
    return QuantisedWeight(apart_OK.to(torch.int8), scales_OG, None, 8, order_K, name)


def by_group(groups_K: Tensor, num_groups: int, name: str) -> Tensor | None:
    """Columns in the order of their groups, for a weight with a group index of each column (``g_idx``).

    Args:
        groups_K: the group of every column.
    Returns:
        int64 [K]: which column comes where; None: they stand in order.
    Raises:
        ModelError: groups that do not exist, or that are not equally large.
    """
    inputs = len(groups_K)
    groups_K = groups_K.long()
    if inputs % num_groups or int(groups_K.min()) < 0 or int(groups_K.max()) >= num_groups:
        raise ModelError(f"the tensor '{name}' names groups that do not fit its {num_groups} scales")
    if bool((groups_K.bincount(minlength=num_groups) != inputs // num_groups).any()):
        raise ModelError(f"the tensor '{name}' makes groups of different sizes, which is not read")
    if bool((groups_K.diff() >= 0).all()):
        return None
    return groups_K.argsort(stable=True)
