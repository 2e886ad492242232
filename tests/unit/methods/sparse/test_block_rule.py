"""Which blocks are kept: the budget by the paper's formula, the selection against a list that is sorted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.methods.sparse.block_rule import BlockRule, scores
from helpers.sparse import kept_columns


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (100, 0),  # not longer than dense_below
        (4096, 0),
        (8192, 2 * int((4096 * 0.1 + 4096) / 64)),
        (16384, 2 * int((12288 * 0.1 + 4096) / 64)),
    ],
)
def test_the_budget_is_piecewise(prefix: int, expected: int) -> None:
    assert BlockRule(budget=0.1, dense_below=4096).keep(prefix, 2) == expected


def test_the_budget_of_a_layer_is_floored_over_all_heads_or_for_each() -> None:
    # (1000 * 0.3) * 3 / 16 = 56.25 blocks of a layer, 18.75 of a head
    assert BlockRule(budget=0.3, dense_below=0, size=16, across_heads=True).keep(1000, 3) == 56
    assert BlockRule(budget=0.3, dense_below=0, size=16).keep(1000, 3) == 54


def test_what_is_always_kept_is_kept_where_the_budget_is_smaller() -> None:
    assert BlockRule(budget=0.01, dense_below=0, size=16, sinks=2, locals=3).keep(1000, 2) == 10
    assert BlockRule(budget=0.01, dense_below=0, size=16, sinks=0, locals=0).keep(160, 2) == 2


@pytest.mark.parametrize("across", [False, True])
def test_a_whole_budget_is_dense(across: bool) -> None:
    rule = BlockRule(budget=1.0, dense_below=0, size=16, across_heads=across)
    assert not any(rule.keep(prefix, groups) for prefix in range(0, 700, 7) for groups in (1, 2, 3, 8))


def test_equal_scores_go_to_the_earlier_head_and_block() -> None:
    flat = torch.zeros(2, 6)
    per_head = BlockRule(sinks=0, locals=1).select(flat, 6)
    assert [each.tolist() for each in per_head] == [[0, 1, 5], [0, 1, 5]]
    across = BlockRule(sinks=0, locals=1, across_heads=True).select(flat, 6)
    assert [each.tolist() for each in across] == [[0, 1, 2, 3, 5], [5]]


def test_nan_scores_are_the_worst() -> None:
    scores_GN = torch.tensor([[0.0, torch.nan, -5.0, torch.nan, 0.0]])
    assert BlockRule(sinks=1, locals=1).select(scores_GN, 3)[0].tolist() == [0, 2, 4]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_kept_blocks_are_those_of_the_definition(data: st.DataObject) -> None:
    G, n, D = data.draw(st.sampled_from([(1, 1, 4), (2, 3, 4), (3, 2, 5), (4, 1, 8)]))
    rule = BlockRule(
        budget=data.draw(st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0])),
        dense_below=data.draw(st.sampled_from([0, 16, 48])),
        size=data.draw(st.sampled_from([4, 8])),
        sinks=data.draw(st.integers(0, 2)),
        locals=data.draw(st.integers(0, 3)),
        across_heads=data.draw(st.booleans()),
    )
    prefix = data.draw(st.integers(0, 120))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    q_HD, k_GPD = torch.randn(G * n, D, generator=generator), torch.randn(G, prefix, D, generator=generator)
    expected = kept_columns(q_HD, k_GPD, rule)
    keep = rule.keep(prefix, G)
    if not keep:
        assert expected == [set(range(prefix))] * G
        return
    B, whole = rule.size, rule.num_blocks(prefix)
    means_GND = k_GPD[:, : whole * B].view(G, whole, B, D).mean(dim=2)
    chosen = rule.select(scores(q_HD, means_GND), keep)
    assert sum(map(len, chosen)) == keep
    for head, blocks in enumerate(chosen):
        assert blocks.tolist() == sorted(set(blocks.tolist()))
        columns = {b * B + i for b in blocks.tolist() for i in range(B)} | set(range(whole * B, prefix))
        assert columns == expected[head]
