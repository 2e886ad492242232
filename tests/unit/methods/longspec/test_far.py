"""Attention to the target's keys against the library's kernel, and what deeper levels leave out of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretoken.methods.longspec import far

HEADS, GROUPS, WIDTH = 6, 2, 16


def drawn(rows: int, length: int) -> tuple[torch.Tensor, far.KeysValues]:
    generator = torch.Generator().manual_seed(length)
    q_HRd, k_GPd, v_GPd = (
        torch.randn(heads, count, WIDTH, generator=generator, dtype=torch.float64)
        for heads, count in ((HEADS, rows), (GROUPS, length), (GROUPS, length))
    )
    return q_HRd, (k_GPd, v_GPd)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 77), (16, 200)])
def test_attention_is_the_library_s(rows: int, length: int) -> None:
    q_HRd, keys = drawn(rows, length)
    found, weights_GFP = far.attend(q_HRd, keys)
    wide = [each.repeat_interleave(HEADS // GROUPS, 0) for each in keys]
    expected = F.scaled_dot_product_attention(q_HRd, *wide).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert weights_GFP.shape == (GROUPS, rows * HEADS // GROUPS, length)
    torch.testing.assert_close(weights_GFP.sum(-1), torch.ones(weights_GFP.shape[:2]))


def test_deeper_levels_read_the_heaviest_blocks_in_their_order() -> None:
    """Of each head its own, with the first, the last, and the rest behind whole blocks."""
    length = 40 * far.BLOCK + 5
    assert length > far.DENSE
    marked = torch.arange(length, dtype=torch.float32)[None, :, None].expand(GROUPS, -1, WIDTH)
    weights_GFP = torch.zeros(GROUPS, 3, length)
    heavy = ((7, 30, 22), (11, 3, 38))
    for group, blocks in enumerate(heavy):
        for block in blocks:
            weights_GFP[group, 1, block * far.BLOCK + 4] = 0.2
        weights_GFP[group, 0, 20 * far.BLOCK] = 0.01  # lighter
    found = far.chosen(weights_GFP, (marked, -marked))
    rest = list(range(40 * far.BLOCK, length))
    for group, blocks in enumerate(heavy):
        expected = [
            block * far.BLOCK + place for block in sorted([0, *blocks, 39]) for place in range(far.BLOCK)
        ] + rest
        assert found[0][group, :, 0].tolist() == expected
        assert found[1][group, :, 0].tolist() == [-each for each in expected]


def test_short_prefixes_are_read_whole() -> None:
    _, keys = drawn(1, far.DENSE)
    found = far.chosen(torch.ones(GROUPS, 3, far.DENSE), keys)
    assert found is keys
