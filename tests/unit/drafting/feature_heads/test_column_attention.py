"""Attention of columns with its own backward pass, against the library's; and RMSNorm that gives what products read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretoken.drafting.feature_heads.block import Norm
from foretoken.drafting.feature_heads.column_attention import columns_attend


@pytest.mark.parametrize("groups", [2, 6])
def test_columns_see_the_pairs_up_to_theirs_and_their_own_steps(groups: int) -> None:
    """Whether queries share keys or not, with gradients that lie as a layer's output does, row by row."""
    torch.manual_seed(0)
    heads, count, columns, steps, width, wide = 6, 4, 9, 2, 8, 5
    column_N = torch.tensor([0, 3, 4, 8])
    q, k, v = torch.randn(heads, count, width), torch.randn(groups, columns, width), torch.randn(groups, columns, wide)
    own_k, own_v = torch.randn(groups, count, steps, width), torch.randn(groups, count, steps, wide)
    parts = [each.requires_grad_(True) for each in (q, k, v, own_k, own_v)]
    found = columns_attend(q, k, v, column_N, 0.3, own_k, own_v)
    rows = []
    for place, column in enumerate(column_N.tolist()):
        keys = torch.cat([k[:, : column + 1], own_k[:, place]], 1).repeat_interleave(heads // groups, 0)
        values = torch.cat([v[:, : column + 1], own_v[:, place]], 1).repeat_interleave(heads // groups, 0)
        rows.append(F.scaled_dot_product_attention(q[:, place : place + 1], keys, values, scale=0.3))
    expected = torch.cat(rows, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(count, heads, wide).transpose(0, 1)
    ours = torch.autograd.grad((found * weights).sum(), parts)
    theirs = torch.autograd.grad((expected * weights).sum(), parts)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_norm_gives_what_products_read() -> None:
    torch.manual_seed(0)
    norm = Norm(24, eps=1e-4)
    with torch.no_grad():
        norm.weight.normal_()
    x, weights = torch.randn(5, 24, requires_grad=True), torch.randn(5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.bfloat16
    expected = norm(x)
    torch.testing.assert_close(found.float(), expected, rtol=8e-3, atol=1e-6)
    ours = torch.autograd.grad((found.float() * weights).sum(), [x, norm.weight])
    theirs = torch.autograd.grad((expected * weights).sum(), [x, norm.weight])
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
