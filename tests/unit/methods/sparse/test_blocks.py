"""The kept blocks and their statistics: against plain Python, and after rollbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.forward.cache import KVCache
from foretoken.methods.sparse.blocks import (
    SCORES,
    SETS,
    BlockRule,
    BlockSummaries,
    scores_of_summaries,
    weights_of_blocks,
)
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
    assert BlockRule(budget=0.3, dense_below=0, size=16, sets="global").keep(1000, 3) == 56
    for sets in ("per_head", "per_layer"):
        assert BlockRule(budget=0.3, dense_below=0, size=16, sets=sets).keep(1000, 3) == 54


def test_fixed_blocks_are_kept_under_a_smaller_budget() -> None:
    assert BlockRule(budget=0.01, dense_below=0, size=16, sinks=2, locals=3).keep(1000, 2) == 10
    assert BlockRule(budget=0.01, dense_below=0, size=16, sinks=0, locals=0).keep(160, 2) == 2


@pytest.mark.parametrize(
    ("rule", "rows", "share", "expected"),
    [
        ({}, 1, 1.0, False),  # the root's scores cost 0.6 of its attention, and 0.55 is read
        ({}, 2, 1.0, True),
        ({}, 1, 0.5, True),  # half of the layers choose
        ({"score": "mean"}, 1, 1.0, True),  # one product a block
        ({"voters": "all"}, 8, 1.0, False),  # every row scores for itself
        ({"voters": "all", "budget": 0.01, "dense_below": 1024}, 8, 1.0, True),
        ({"voters": "all", "gated": False}, 8, 1.0, True),
    ],
)
def test_attention_is_sparse_where_that_costs_less(
    rule: dict[str, Any], rows: int, share: float, expected: bool
) -> None:
    """At the default budget after 8,192 rows."""
    given = BlockRule(**{"gated": True, **rule})
    assert given.pays(8192, given.keep(8192, 2), 2, rows, share) == expected


@pytest.mark.parametrize("sets", SETS)
def test_a_whole_budget_is_dense(sets: str) -> None:
    rule = BlockRule(budget=1.0, dense_below=0, size=16, sets=sets)
    assert not any(rule.keep(prefix, groups) for prefix in range(0, 700, 7) for groups in (1, 2, 3, 8))


def test_equal_scores_go_to_the_earlier_head_and_block() -> None:
    flat = torch.zeros(2, 6)
    per_head = BlockRule(sinks=0, locals=1).select(flat, 6)
    assert [each.tolist() for each in per_head] == [[0, 1, 5], [0, 1, 5]]
    across = BlockRule(sinks=0, locals=1, sets="global").select(flat, 6)
    assert [each.tolist() for each in across] == [[0, 1, 2, 3, 5], [5]]


def test_a_set_of_the_layer_is_that_of_the_summed_scores() -> None:
    """Block 1 is the layer's first choice and no head's; each of two heads would keep another block for itself."""
    scores_GN = torch.tensor([[0.0, 5.0, 6.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 6.0, 0.0, 0.0]])
    rule = BlockRule(sinks=1, locals=1, sets="per_layer")
    assert [each.tolist() for each in rule.select(scores_GN, 6)] == [[0, 1, 5], [0, 1, 5]]
    assert [each.tolist() for each in replace(rule, sets="per_head").select(scores_GN, 6)] == [[0, 2, 5], [0, 3, 5]]
    broken_GN = torch.tensor([[0.0, torch.inf, 1.0, 0.0], [0.0, -torch.inf, 1.0, 0.0]])
    assert rule.select(broken_GN, 6)[1].tolist() == [0, 2, 3]


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
        sets=data.draw(st.sampled_from(SETS)),
        score=data.draw(st.sampled_from(SCORES)),
    )
    prefix = data.draw(st.integers(0, 120))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    q_HD, k_GLD = torch.randn(G * n, D, generator=generator), torch.randn(G, prefix + 1, D, generator=generator)
    expected = kept_columns(q_HD, k_GLD, prefix, rule, 0.7)
    keep = rule.keep(prefix, G)
    if not keep:
        assert expected == [set(range(prefix))] * G
        return
    B, whole = rule.size, rule.num_blocks(prefix)
    blocks_GNBD = k_GLD[:, : whole * B].view(G, whole, B, D)
    known = {
        "mean": blocks_GNBD.mean(dim=2),
        "bounds": torch.cat([blocks_GNBD.min(dim=2).values, blocks_GNBD.max(dim=2).values], dim=-1),
    }
    if rule.score == "exact":
        scores_GN = weights_of_blocks(q_HD, k_GLD, B, whole, scaling=0.7)
    else:
        scores_GN = scores_of_summaries(q_HD, known[rule.score])
    chosen = rule.select(scores_GN, keep)
    assert sum(map(len, chosen)) == keep
    for head, blocks in enumerate(chosen):
        assert blocks.tolist() == sorted(set(blocks.tolist()))
        columns = {b * B + i for b in blocks.tolist() for i in range(B)} | set(range(whole * B, prefix))
        assert columns == expected[head]


def test_the_exact_score_finds_a_key_that_the_mean_hides() -> None:
    """One column that the root asks for, in a block with other columns that point away from it."""
    q_HD = torch.tensor([[1.0, 0.0]])
    k_GLD = torch.zeros(1, 17, 2)
    k_GLD[0, 4:8, 0] = -3.0
    k_GLD[0, 5, 0] = 8.0
    k_GLD[0, 8:12, 0] = 0.5
    blocks_GNBD = k_GLD[:, :16].view(1, 4, 4, 2)
    assert int(weights_of_blocks(q_HD, k_GLD, 4, 4, scaling=1.0).argmax()) == 1
    bounds = torch.cat([blocks_GNBD.amin(dim=2), blocks_GNBD.amax(dim=2)], dim=-1)
    assert int(scores_of_summaries(q_HD, bounds).argmax()) == 1
    assert int(scores_of_summaries(q_HD, blocks_GNBD.mean(dim=2)).argmax()) == 2


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_no_key_of_a_block_scores_above_its_bound(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_HD, keys_GNBD = torch.randn(6, 5, generator=generator), torch.randn(2, 7, 4, 5, generator=generator)
    bounds = torch.cat([keys_GNBD.amin(dim=2), keys_GNBD.amax(dim=2)], dim=-1)
    best_GN = (keys_GNBD @ q_HD.view(2, 3, 5).sum(dim=1)[:, None, :, None])[..., 0].amax(dim=-1)
    assert bool((scores_of_summaries(q_HD, bounds) >= best_GN - 1e-5).all())


def test_attention_sinks_and_caps_change_a_heads_share() -> None:
    """Of two heads, the one that attends to nothing counts for less."""
    q_HD = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    k_GLD = torch.zeros(1, 9, 2)
    k_GLD[0, 1, 0], k_GLD[0, 5, 1] = 1.0, 1.1
    plain = weights_of_blocks(q_HD, k_GLD, 4, 2, scaling=1.0)[0]
    assert plain[1] > plain[0]
    sunk = weights_of_blocks(q_HD, k_GLD, 4, 2, scaling=1.0, sinks_H=torch.tensor([-9.0, 9.0]))[0]
    assert sunk[0] > sunk[1]
    capped = weights_of_blocks(q_HD, k_GLD, 4, 2, scaling=1.0, softcap=1e-6)[0]
    torch.testing.assert_close(capped, torch.full((2,), 8 / 9), rtol=0, atol=1e-5)


LAYERS, GROUPS, WIDTH, SIZE = 2, 2, 3, 4
SLOTS, LENGTH = 4, 60


def write(cache: KVCache, slot: int, count: int, generator: torch.Generator) -> None:
    """Random rows after the committed prefix, as attention writes them."""
    cache.reserve(slot, count)
    begin = cache.lengths[slot]
    for layer in range(LAYERS):
        rows = torch.randn(GROUPS, count, WIDTH, generator=generator)
        keys, values = cache.buffers(layer, rows, rows)
        keys[slot, :, begin : begin + count] = rows
        values[slot, :, begin : begin + count] = rows


def brute_force(cache: KVCache, layer: int, slot: int, score: str) -> Tensor:
    keys = cache.keys[layer]
    assert keys is not None
    whole = cache.lengths[slot] // SIZE
    blocks = [keys[slot, :, b * SIZE : (b + 1) * SIZE] for b in range(whole)]
    if score == "mean":
        known = [each.mean(dim=1) for each in blocks]
    else:
        known = [torch.cat([each.min(dim=1).values, each.max(dim=1).values], dim=-1) for each in blocks]
    return torch.stack(known, dim=1) if known else keys.new_zeros(GROUPS, 0, WIDTH * (1 + (score == "bounds")))


def assert_agree(cache: KVCache, known: BlockSummaries, score: str, layer: int, slots: list[int]) -> None:
    found = known.of(layer, slots)
    for slot in slots:
        whole = cache.lengths[slot] // SIZE
        expected = brute_force(cache, layer, slot, score)
        torch.testing.assert_close(found[slot, :, :whole], expected, rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_history_gives_the_means_and_bounds_of_the_committed_rows(data: st.DataObject) -> None:
    """Chunks, trees kept in part, prefixes cut and grown again, slots given back, taken again and forked."""
    cache = KVCache(LAYERS, SLOTS, LENGTH)
    cache.capacity = 6  # growth happens here
    score = data.draw(st.sampled_from(SCORES[1:]))
    known = BlockSummaries(cache, SIZE, score)
    generator = torch.Generator().manual_seed(0)
    slots = [cache.acquire()]
    write(cache, slots[0], 5, generator)
    cache.commit(slots[0], range(5))
    for _ in range(data.draw(st.integers(2, 12))):
        move = data.draw(st.sampled_from(["commit", "rollback", "fork", "replace"]))
        slot = data.draw(st.sampled_from(slots))
        room = LENGTH - cache.lengths[slot]
        if move == "commit" and room:
            count = data.draw(st.integers(1, min(room, 17)))
            write(cache, slot, count, generator)
            dropped = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
            cache.commit(slot, sorted({*range(count)} - dropped))
        elif move == "rollback":
            cache.rollback(slot, data.draw(st.integers(0, cache.lengths[slot])))
        elif move == "fork" and cache.free_slots:
            slots.append(cache.fork(slot))
        elif move == "replace":
            cache.release(slot)
            slots[slots.index(slot)] = cache.acquire()
        if data.draw(st.booleans()):  # not always: a late call must be right, too
            assert_agree(cache, known, score, data.draw(st.integers(0, LAYERS - 1)), slots)
    for layer in range(LAYERS):
        assert_agree(cache, known, score, layer, slots)


def test_a_block_is_averaged_when_it_is_whole_and_not_again() -> None:
    cache = KVCache(LAYERS, 1, LENGTH)
    slot = cache.acquire()
    generator = torch.Generator().manual_seed(0)
    write(cache, slot, 7, generator)
    cache.commit(slot, range(7))
    means = BlockSummaries(cache, SIZE, "mean")
    first = means.of(0, [slot])[slot, :, 0].clone()
    keys = cache.keys[0]
    assert keys is not None
    keys[slot, :, :SIZE] += 1  # a committed row never changes; if it did, its statistics would not be computed again
    write(cache, slot, 2, generator)
    cache.commit(slot, [0])
    found = means.of(0, [slot])
    assert torch.equal(found[slot, :, 0], first)
    torch.testing.assert_close(found[slot, :, 1], keys[slot, :, SIZE : 2 * SIZE].mean(dim=1))


def test_half_precision_keys_are_summed_in_single_precision() -> None:
    cache = KVCache(1, 1, 64)
    slot = cache.acquire()
    cache.reserve(slot, 64)
    rows = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys, _ = cache.buffers(0, rows, rows)
    keys[slot, :, :64] = rows
    cache.commit(slot, range(64))
    found = BlockSummaries(cache, 64, "mean").of(0, [slot])[slot, :, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rows.double().mean(dim=1).float(), rtol=0, atol=1e-6)


def test_a_cache_does_not_keep_its_followers_alive() -> None:
    cache = KVCache(1, 1, 8)
    means = BlockSummaries(cache, 4, "bounds")
    assert len(cache.followers) == 1
    del means
    assert len(cache.followers) == 0
