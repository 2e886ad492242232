"""The native decoder's sparse attention: against the plan that the library's layers call, and its promise of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.protocols import Plan
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.methods.sparse.attention import SparseAttention, SparseAttentionPlan
from foretoken.methods.sparse.blocks import SCORES, BlockRule
from foretoken.models.language_model import LanguageModel
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.golden import PARENTS
from helpers.native_models import error, make, text

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

TREE = TokenTree(text(len(PARENTS), 2), PARENTS)
CHAIN = TokenTree(text(5, 3))
PREFIXES = (200, 133, 90, 176)  # the last ends where a block does
RULE = BlockRule(budget=0.4, dense_below=0, size=16, sinks=1, locals=1)
RULES = {
    "per head": RULE,
    "across heads": replace(RULE, sets="global"),
    "nothing fixed": replace(
        RULE, sinks=0, locals=0, sets="global"
    ),  # the last block may be left out, and a head have none
    "per layer": replace(RULE, sets="per_layer"),
    "bounds": replace(RULE, score="bounds"),
    "all rows": replace(RULE, voters="all"),
    "all rows, bounds, across heads": replace(RULE, score="bounds", sets="global", voters="all"),
    "all rows, per layer": replace(RULE, sets="per_layer", voters="all"),
    "bounds, across heads": replace(RULE, score="bounds", sets="global"),
    "mean": replace(RULE, score="mean"),
    "mean, per layer": replace(RULE, score="mean", sets="per_layer"),
    "mean, across heads": replace(RULE, score="mean", sets="global"),
}


def filled(model: LanguageModel) -> KVCache:
    """Four slots with committed prefixes."""
    cache = model.new_cache(len(PREFIXES))
    for number, prefix in enumerate(PREFIXES):
        slot = cache.acquire()
        batch = PackedBatch()
        batch.add_chunk(slot, 0, text(prefix, number), wanted=1)
        cache.reserve(slot, prefix)
        model.forward(batch, DensePlan(cache, batch))
        cache.commit(slot, range(prefix))
    return cache


def ragged(cache: KVCache) -> PackedBatch:
    """A tree, a chunk of a prompt, plain decoding and a chain; the tree's rows first."""
    batch = PackedBatch()
    batch.add_tree(0, PREFIXES[0], 7, TREE)
    batch.add_chunk(1, PREFIXES[1], text(6, 9), wanted=6)
    batch.add_tree(2, PREFIXES[2], 8, TokenTree(()))
    batch.add_tree(3, PREFIXES[3], 9, CHAIN)
    for segment in batch.segments:
        cache.reserve(segment.slot, segment.num_rows)
    return batch


def logits(model: LanguageModel, batch: PackedBatch, plan: Plan, **options: Any) -> Tensor:
    return model.forward(batch, plan, **options).logits_MV.float().clone()


def called(plan: DensePlan) -> DensePlan:
    """The same plan, layer by layer."""
    plan.native = None
    return plan


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "family", ["llama", "llama, one group", "llama, no groups", "qwen2, mixed windows", "mistral, window", "qwen3"]
)
def test_the_decoder_and_the_plan_agree_in_float32(family: str, rule: str) -> None:
    model, _ = make(family, torch.float32)
    cache = filled(model)
    batch = ragged(cache)
    factory = SparseAttention(RULES[rule])
    native = logits(model, batch, factory(cache, batch))
    layered = logits(model, batch, called(factory(cache, batch)))
    assert error(native, layered) < 1e-4
    dense = logits(model, batch, DensePlan(cache, batch))
    chunk = slice(1 + len(TREE), 1 + len(TREE) + 6)
    assert torch.equal(native[chunk], dense[chunk])  # a prompt next to sparse segments is dense, bit for bit
    if family == "mistral, window":  # no layer sees far
        assert torch.equal(native, dense)
    else:
        assert error(native, dense) > 0.1  # the control: the other rows are not dense


@pytest.mark.covering(1)
@pytest.mark.parametrize("anchors", [[0, 1], [0, 2], [2]], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_anchors_blocks_are_reused(rule: str, anchors: Sequence[int]) -> None:
    model, _ = make("llama", torch.float32)
    cache = filled(model)
    batch = ragged(cache)
    factory = SparseAttention(RULES[rule], anchors)
    native = logits(model, batch, factory(cache, batch))
    assert error(native, logits(model, batch, called(factory(cache, batch)))) < 1e-4
    everywhere = logits(model, batch, SparseAttention(RULES[rule])(cache, batch))
    assert error(native, everywhere) > 0.1


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2, mixed windows"])
@pytest.mark.parametrize("rule", RULES)
def test_with_every_block_selected_the_bits_are_dense(family: str, dtype: torch.dtype, rule: str) -> None:
    """Through the selection and the runs of columns, which a plan without anything to leave out would not take."""
    model, _ = make(family, dtype)
    cache = filled(model)
    batch = ragged(cache)
    plan = SparseAttention(RULES[rule])(cache, batch)
    assert plan.native is not None
    assert plan.native.blocks is not None
    every = [2 * (segment.prefix // 16) if segment.verification else 0 for segment in batch.segments]
    plan.native = NativePlan(cache, replace(plan.native.blocks, keep=every))
    assert torch.equal(logits(model, batch, plan), logits(model, batch, DensePlan(cache, batch)))


@pytest.mark.parametrize("limits", [{"budget": 1.0}, {"dense_below": 200}], ids=["budget", "short"])
def test_where_nothing_is_left_out_the_bits_are_dense(limits: dict[str, Any]) -> None:
    model, _ = make("llama", torch.bfloat16)
    cache = filled(model)
    batch = ragged(cache)
    plan = SparseAttention(replace(RULE, **limits))(cache, batch)
    assert torch.equal(logits(model, batch, plan), logits(model, batch, DensePlan(cache, batch)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", [name for name, each in RULES.items() if each.voters == "root"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sparse_row_depends_on_its_own_past_and_root_only(dtype: torch.dtype, rule: str) -> None:
    """Not on neighbours, threads, or the shape of the draft that it stands in; on the step's root it does."""
    model, _ = make("qwen3", dtype)
    cache = filled(model)
    batch = ragged(cache)
    factory = SparseAttention(RULES[rule])
    together = logits(model, batch, factory(cache, batch))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(logits(model, batch, factory(cache, batch)), together)
    finally:
        torch.set_num_threads(before)
    alone = PackedBatch()
    alone.add_tree(0, PREFIXES[0], 7, TREE)
    rows = logits(model, alone, factory(cache, alone))
    assert torch.equal(rows, together[: len(rows)])
    for node in range(len(TREE)):
        path = [TREE.tokens[above] for above in TREE.path_to(node)]
        chain = PackedBatch()
        chain.add_tree(0, PREFIXES[0], 7, TokenTree(path))
        assert torch.equal(logits(model, chain, factory(cache, chain))[-1], rows[node + 1])


@pytest.mark.parametrize("rule", RULES)
def test_rows_after_a_tail_choose_the_same_blocks_in_both(rule: str) -> None:
    """As when the sparse target drafts: rows after the prefix, not committed, that a chain and a tree look at."""
    model, _ = make("llama", torch.float32)
    cache = filled(model)
    first = PackedBatch()
    first.add_chunk(0, PREFIXES[0], [7, 3, 9], wanted=3, verification=True)
    cache.reserve(0, 8)
    factory = SparseAttention(RULES[rule])
    logits(model, first, factory(cache, first))
    chain = PackedBatch()
    chain.add_chunk(0, PREFIXES[0], [5, 2], wanted=2, tail=3, verification=True)
    assert (
        error(logits(model, chain, factory(cache, chain)), logits(model, chain, called(factory(cache, chain)))) < 1e-4
    )
    segment = chain.segments[0]
    seen = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]], dtype=torch.bool)
    chain.segments[0] = replace(segment, seen=seen, depths=(0, 1, 1, 2, 2))
    tree = logits(model, chain, factory(cache, chain))
    assert error(tree, logits(model, chain, called(factory(cache, chain)))) < 1e-4


def test_a_forward_that_begins_after_the_anchors_selects_in_its_first_layer() -> None:
    model, _ = make("llama", torch.float32)
    cache = filled(model)
    batch = ragged(cache)
    factory = SparseAttention(RULE, anchors=[0])
    below = model.forward(batch, DensePlan(cache, batch), span=Span(0, 1, taps=(1,))).hidden[1]
    upper = Span(1, 3, below.clone())
    native = logits(model, batch, factory(cache, batch), span=upper)
    layered = logits(model, batch, called(factory(cache, batch)), span=upper)
    assert error(native, layered) < 1e-4


@pytest.mark.parametrize("score", SCORES)
def test_scores_follow_the_cache_through_the_fused_decoder(score: str) -> None:
    """Steps, a rollback and other rows: after them, as with a factory that has never seen this cache."""
    model, _ = make("llama", torch.float32)
    cache = filled(model)
    rule = replace(RULE, score=score)
    factory = SparseAttention(rule)
    batch = ragged(cache)
    logits(model, batch, factory(cache, batch))
    cache.rollback(0, 30)
    batch = PackedBatch()
    batch.add_chunk(0, 30, text(150, 77), wanted=1)
    cache.reserve(0, 150)
    model.forward(batch, DensePlan(cache, batch))
    cache.commit(0, range(150))
    batch = PackedBatch()
    batch.add_tree(0, 180, 7, TREE)
    cache.reserve(0, 1 + len(TREE))
    known = logits(model, batch, factory(cache, batch))
    assert torch.equal(known, logits(model, batch, SparseAttention(rule)(cache, batch)))


def test_a_broken_model_still_gives_nan() -> None:
    model, _ = make("llama", torch.bfloat16)
    cache = filled(model)
    with torch.no_grad():
        model.model.model.embed_tokens.weight[7] = torch.nan
    batch = ragged(cache)
    assert torch.isnan(logits(model, batch, SparseAttention(RULE)(cache, batch))[0]).all()


def test_the_clock_of_attention_is_a_part_of_the_forward() -> None:
    class Clock:
        attention_seconds = 0.0

    model, _ = make("llama", torch.float32)
    cache = filled(model)
    batch = ragged(cache)
    clock = Clock()
    plan = SparseAttention(RULE)(cache, batch)
    assert isinstance(plan, SparseAttentionPlan)
    assert plan.native is not None
    plain = logits(model, batch, plan)
    plan.native = replace(plan.native, clock=clock)
    assert torch.equal(logits(model, batch, plan), plain)
    assert clock.attention_seconds > 0


def test_a_whole_budget_gives_the_dense_text() -> None:
    """The zoo's model for long contexts, with drafts, whichever way blocks are shared."""
    llm = LLM("zoo:long", device="cpu", max_num_seqs=1, speculative_config=None)
    names = ["Maria", "Tom", "Ann", "Leo", "Ruth"]
    text = " ".join(f"{names[n % 5]} has {n * 7 % 90} apples and {n * 3 % 40} pears." for n in range(60))
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def run(config: dict[str, Any] | None) -> tuple[list[int], Tensor]:
        """The tokens, and the last layer's keys of everything but the last token."""
        engine = llm.with_method(config)
        (output,) = engine.generate(text, params)
        keys = engine.engine.cache.keys[-1]
        assert keys is not None
        return output.token_ids, keys[0, :, : len(output.prompt_token_ids) + 15]

    tokens, keys = run(None)
    sparse = {"attention": "per_head", "dense_below": 0, "budget": 1.0}
    for method, attention in (("ngram", "per_head"), ("none", "global"), ("ngram", "per_layer")):
        found, rows = run({"method": method, "verification": {**sparse, "attention": attention}})
        assert found == tokens
        assert torch.equal(rows, keys)
    _, rows = run({"method": "none", "verification": {**sparse, "budget": 0.01}})
    assert not torch.equal(rows, keys)  # the control
