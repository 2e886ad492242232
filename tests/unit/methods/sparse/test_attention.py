"""The sparse plan, called layer by layer, against dense attention with everything else masked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.methods.sparse.attention import SparseAttention, SparseAttentionPlan
from foretoken.methods.sparse.blocks import SCORES, SETS, BlockRule
from helpers import sparse
from helpers.golden import random_tree

TREE = random_tree(0, 10)
EMPTY = TokenTree(())
CHAIN = TokenTree((1, 2, 3))


class Case:
    """A cache with prefixes, and a batch after them.

    Args:
        shape: query heads, key heads, key width, value width.
        requests: committed rows, and then a draft after a root, or a chunk's length.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        requests: list[tuple[int, int | TokenTree]],
        layers: int = 1,
        seed: int = 0,
    ) -> None:
        H, self.G, D, Dv = shape
        self.widths = ((H, D), (self.G, D), (self.G, Dv))
        self.layers = layers
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(layers, 8, 512)
        self.batch = PackedBatch()
        for prefix, what in requests:
            slot = self.cache.acquire()
            self.commit(slot, prefix)
            if isinstance(what, int):
                self.batch.add_chunk(slot, prefix, [0] * what, wanted=what)
            else:
                self.batch.add_tree(slot, prefix, 0, what)
            self.cache.reserve(slot, self.batch.segments[-1].num_rows)

    def draw(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator)

    def commit(self, slot: int, count: int) -> None:
        if not count:
            return
        self.cache.reserve(slot, count)
        before = PackedBatch()
        before.add_chunk(slot, self.cache.lengths[slot], [0] * count, wanted=0)
        for layer in range(self.layers):
            q, k, v = (self.draw(heads, count, width) for heads, width in self.widths)
            DensePlan(self.cache, before).attend(layer, q, k, v, scaling=1.0)
        self.cache.commit(slot, range(count))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """As a model hands them over: heads first, but strided."""
        q, k, v = (self.draw(len(self.batch), heads, width).transpose(0, 1) for heads, width in self.widths)
        return q, k, v

    def expected(self, layer: int, q_HTD: Tensor, rule: BlockRule, scaling: float, choosing: Any = None) -> Tensor:
        """By the definition; keys and values of the rows must have been written.

        Args:
            choosing: layer and queries that chose the blocks, if not this layer with these.
        """
        outputs = []
        for segment in self.batch.segments:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            assert keys is not None
            assert values is not None
            visible = segment.prefix + segment.tail + segment.num_rows
            chooser, queries = (layer, q_HTD) if choosing is None else choosing
            roots_keys = self.cache.keys[chooser][segment.slot, :, : segment.prefix + 1]  # type: ignore[index]
            columns = sparse.kept_columns(queries[:, segment.start], roots_keys, segment.prefix, rule, scaling)
            if not segment.verification:
                columns = [set(range(segment.prefix))] * self.G
            rows = q_HTD[:, segment.start : segment.start + segment.num_rows]
            outputs.append(
                sparse.attend(
                    rows, keys[segment.slot, :, :visible], values[segment.slot, :, :visible], segment, columns, scaling
                )
            )
        return torch.cat(outputs)


def worst(case: Case, rule: BlockRule) -> float:
    q, k, v = case.inputs()
    plan = SparseAttention(rule)(case.cache, case.batch)
    found = plan.attend(0, q, k, v, scaling=0.4)
    return float((found.double() - case.expected(0, q, rule, 0.4)).abs().max())


RAGGED: list[tuple[int, int | TokenTree]] = [(70, TREE), (9, CHAIN), (64, 5), (83, CHAIN), (100, EMPTY), (0, TREE)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("budget", [0.05, 0.6])
@pytest.mark.parametrize("shape", [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 8), (6, 3, 5, 9)], ids=str)
def test_ragged_batch_equals_the_definition(
    shape: tuple[int, int, int, int], budget: float, sets: str, score: str
) -> None:
    rule = BlockRule(budget=budget, dense_below=10, size=8, sinks=1, locals=2, sets=sets, score=score)
    assert worst(Case(shape, RAGGED), rule) < 3e-6


@pytest.mark.parametrize("tree", [TREE, CHAIN], ids=["tree", "chain"])
def test_votes_are_the_attention_of_all_rows(tree: TokenTree) -> None:
    """Each row's softmax over the prefix and its own path, added by blocks."""
    case = Case((4, 2, 8, 8), [(83, tree)])
    rule = BlockRule(budget=0.4, dense_below=0, size=8, sinks=1, locals=1, voters="all")
    q_HTD, k, v = case.inputs()
    plan = SparseAttention(rule)(case.cache, case.batch)
    plan.attend(0, q_HTD, k, v, scaling=0.4)
    assert isinstance(plan, SparseAttentionPlan)
    keys = case.cache.keys[0]
    assert keys is not None
    votes_GN = torch.zeros(2, 10)
    for row in range(1 + len(tree)):
        path = [0, *(1 + node for node in tree.path_to(row - 1))] if row else [0]
        columns = [*range(83), *(83 + each for each in path)]
        for head in range(4):
            weights_L = torch.softmax(keys[0, head // 2, columns] @ q_HTD[head, row] * 0.4, dim=0)
            votes_GN[head // 2] += weights_L[:80].view(10, 8).sum(dim=1)
    expected = rule.select(votes_GN, rule.keep(83, 2))
    assert [each.tolist() for each in plan.chosen[0]] == [each.tolist() for each in expected]
    root = SparseAttention(replace(rule, voters="root"))(case.cache, case.batch)
    root.attend(0, q_HTD, k, v, scaling=0.4)
    assert isinstance(root, SparseAttentionPlan)
    assert [each.tolist() for each in root.chosen[0]] != [each.tolist() for each in expected]


def test_single_rows_are_dense_where_the_choice_costs_more_than_it_saves() -> None:
    rule = BlockRule(budget=0.5, dense_below=0, size=8, gated=True)
    for tree, sparse_read in ((EMPTY, None), (CHAIN, pytest.approx(0.5, abs=0.1))):
        case = Case((4, 2, 8, 8), [(160, tree)])
        plan = SparseAttention(rule)(case.cache, case.batch)
        assert plan.prefix_read == (None if sparse_read is None else [sparse_read])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_shapes_and_trees_equal_the_definition(data: st.DataObject) -> None:
    G, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    requests: list[tuple[int, int | TokenTree]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(0, 6))
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
        requests.append((data.draw(st.integers(0, 90)), TokenTree([0] * size, parents)))
    rule = BlockRule(
        budget=data.draw(st.sampled_from([0.05, 0.3, 0.7])),
        dense_below=data.draw(st.sampled_from([0, 20])),
        size=data.draw(st.sampled_from([4, 8, 16])),
        sinks=data.draw(st.integers(0, 2)),
        locals=data.draw(st.integers(0, 2)),
        sets=data.draw(st.sampled_from(SETS)),
        score=data.draw(st.sampled_from(SCORES)),
    )
    assert worst(Case((G * n, G, 4, 6), requests, seed=data.draw(st.integers(0, 99))), rule) < 3e-6


def test_the_definition_detects_left_out_blocks() -> None:
    """The control: with the same tolerance, dense attention is not the sparse one."""
    case = Case((4, 2, 8, 8), RAGGED)
    rule = BlockRule(budget=0.6, dense_below=0, size=8)
    q, k, v = case.inputs()
    dense = DensePlan(case.cache, case.batch).attend(0, q, k, v, scaling=0.4)
    assert float((dense.double() - case.expected(0, q, rule, 0.4)).abs().max()) > 0.01


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize(
    "limits", [{"budget": 1.0, "dense_below": 0}, {"budget": 0.1, "dense_below": 100}], ids=["budget", "short"]
)
def test_where_nothing_is_left_out_it_is_the_dense_plan_bit_for_bit(limits: dict[str, Any], sets: str) -> None:
    case = Case((4, 2, 8, 8), RAGGED)
    q, k, v = case.inputs()
    plan = SparseAttention(BlockRule(size=8, sets=sets, **limits))(case.cache, case.batch)
    dense = DensePlan(case.cache, case.batch).attend(0, q, k, v, scaling=0.4)
    assert plan.native is not None
    assert plan.native.blocks is None
    assert torch.equal(plan.attend(0, q, k, v, scaling=0.4), dense)


def test_prompts_in_the_same_batch_stay_dense_bit_for_bit() -> None:
    case = Case((4, 2, 8, 8), RAGGED)
    q, k, v = case.inputs()
    plan = SparseAttention(BlockRule(budget=0.1, dense_below=0, size=8))(case.cache, case.batch)
    found = plan.attend(0, q, k, v, scaling=0.4)
    dense = DensePlan(case.cache, case.batch).attend(0, q, k, v, scaling=0.4)
    chunk = case.batch.segments[2]
    rows = slice(chunk.start, chunk.start + chunk.num_rows)
    assert torch.equal(found[rows], dense[rows])
    assert not torch.equal(found, dense)


def test_layers_with_a_window_stay_dense() -> None:
    case = Case((4, 2, 8, 8), RAGGED)
    q, k, v = case.inputs()
    plan = SparseAttention(BlockRule(budget=0.1, dense_below=0, size=8))(case.cache, case.batch)
    dense = DensePlan(case.cache, case.batch)
    assert torch.equal(
        plan.attend(0, q, k, v, scaling=0.4, window=40), dense.attend(0, q, k, v, scaling=0.4, window=40)
    )


@pytest.mark.parametrize("sets", SETS)
def test_sinks_and_softcap_are_the_dense_plans(sets: str) -> None:
    """Against the dense plan over a cache that holds nothing but the kept columns."""
    case = Case((4, 2, 8, 8), [(70, TREE)])
    rule = BlockRule(budget=0.6, dense_below=0, size=8, sets=sets, score="mean")
    q, k, v = case.inputs()
    sinks_H = case.draw(4)
    found = SparseAttention(rule)(case.cache, case.batch).attend(0, q, k, v, scaling=0.4, softcap=2.0, sinks_H=sinks_H)
    segment = case.batch.segments[0]
    keys, values = case.cache.keys[0], case.cache.values[0]
    assert keys is not None
    assert values is not None
    for g, columns in enumerate(sparse.kept_columns(q[:, 0], keys[segment.slot, :, :71], 70, rule, 0.4)):
        short = KVCache(1, 1, 512)
        slot = short.acquire()
        kept = sorted(columns)
        like = torch.empty(1, 0, 8)
        short.reserve(slot, len(kept) + segment.num_rows)
        for buffer, whole in zip(short.buffers(0, like, like), (keys, values), strict=True):
            buffer[slot, :, : len(kept)] = whole[segment.slot, g : g + 1, kept]
        short.commit(slot, range(len(kept)))
        batch = PackedBatch()
        batch.add_tree(slot, len(kept), 0, TREE)
        some = slice(2 * g, 2 * g + 2)
        expected = DensePlan(short, batch).attend(
            0, q[some], k[g : g + 1], v[g : g + 1], scaling=0.4, softcap=2.0, sinks_H=sinks_H[some]
        )
        torch.testing.assert_close(found[:, some], expected, rtol=0, atol=2e-6)


def test_a_layer_that_is_no_anchor_takes_the_blocks_of_the_anchor_before_it() -> None:
    case = Case((4, 2, 8, 8), RAGGED, layers=5)
    rule = BlockRule(budget=0.6, dense_below=0, size=8)
    plan = SparseAttention(rule, anchors=[1, 3])(case.cache, case.batch)
    choosing: Any = None
    for layer in range(5):
        q, k, v = case.inputs()
        if layer in (0, 1, 3):  # there is no layer before the first
            choosing = layer, q
        found = plan.attend(layer, q, k, v, scaling=0.4)
        assert float((found.double() - case.expected(layer, q, rule, 0.4, choosing)).abs().max()) < 3e-6


@pytest.mark.parametrize("score", SCORES)
def test_blocks_that_were_forgotten_are_summed_up_again(score: str) -> None:
    """Selected, rolled back, filled with other rows: then the definition holds on the new rows."""
    case = Case((4, 2, 8, 8), [(90, CHAIN)])
    rule = BlockRule(budget=0.6, dense_below=0, size=8, score=score)
    factory = SparseAttention(rule)
    q, k, v = case.inputs()
    factory(case.cache, case.batch).attend(0, q, k, v, scaling=0.4)
    slot = case.batch.segments[0].slot
    case.cache.rollback(slot, 19)
    case.commit(slot, 71)
    plan = factory(case.cache, case.batch)
    assert isinstance(plan, SparseAttentionPlan)
    found = plan.attend(0, q, k, v, scaling=0.4)
    assert float((found.double() - case.expected(0, q, rule, 0.4)).abs().max()) < 3e-6


def test_a_factory_serves_more_than_one_cache() -> None:
    rule = BlockRule(budget=0.6, dense_below=0, size=8, score="bounds")
    factory = SparseAttention(rule)
    for seed in (0, 1):
        case = Case((4, 2, 8, 8), RAGGED, seed=seed)
        q, k, v = case.inputs()
        found = factory(case.cache, case.batch).attend(0, q, k, v, scaling=0.4)
        assert float((found.double() - case.expected(0, q, rule, 0.4)).abs().max()) < 3e-6
