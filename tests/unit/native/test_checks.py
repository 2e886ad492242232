"""Nothing reaches native code unchecked: what would read or write foreign memory is an error with a name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.core.errors import InputError
from foretoken.core.tree import TokenTree
from foretoken.drafting.feature_heads.native.checks import check_chain
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.native_plan import Blocks, NativePlan
from foretoken.forward.span import Span
from foretoken.methods.longspec.native.target_layer import check_prefixes
from foretoken.native import build, checks, selftest
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Block, Projection
from foretoken.native.packing import tiled
from helpers.zoo_llms import target

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")


class Case:
    """A sound forward of a root and a small tree after nothing, to be spoilt in one place."""

    def __init__(self) -> None:
        self.model = target()
        self.cache = self.model.new_cache(2)
        self.slot = self.cache.acquire()
        self.batch = PackedBatch()
        self.batch.add_tree(self.slot, 0, 5, TokenTree((6, 7, 8), (-1, -1, 0)))
        self.plan = NativePlan(self.cache)
        self.span = Span(0, self.model.num_layers)
        self.top = 2

    def segment(self, **changes: Any) -> None:
        self.batch.segments[0] = replace(self.batch.segments[0], **changes)

    def run(self) -> Any:
        assert self.model.native_decoder is not None
        return self.model.native_decoder.forward(self.batch, self.plan, self.span, top=self.top)


def blocks(**changes: Any) -> Blocks:
    sound: dict[str, Any] = {"size": 16, "sinks": 1, "locals": 1, "sets": "global", "keep": (0,), "score": "mean"}
    sound["voters"] = "root"
    sound |= {"selects": lambda layer: True, "summaries": lambda layer: torch.zeros(1)}
    return Blocks(**{**sound, **changes})


def no_reserve(case: Case) -> None:
    case.segment(prefix=case.cache.capacity - 2)


def entering(case: Case, values: torch.Tensor) -> None:
    case.span = replace(case.span, first=1, entering_TD=values)


def plan(case: Case, **changes: Any) -> None:
    case.plan = replace(case.plan, **changes)


def other_cache(case: Case) -> None:
    cache = KVCache(case.model.num_layers, 2, 64)
    cache.acquire()
    row = torch.empty(3, 0, 16)
    for layer in range(case.model.num_layers):
        cache.buffers(layer, row, row)
    plan(case, cache=cache)


SPOILT: dict[str, tuple[Callable[[Case], Any], str]] = {
    "a token beyond the embedding": (lambda c: c.batch.tokens.__setitem__(2, 10**7), "token 10000000 is not in the"),
    "a negative token": (lambda c: c.batch.tokens.__setitem__(0, -1), "token -1 is not in the model's embedding"),
    "no room": (no_reserve, "reserve them before the forward"),
    "a slot that is none": (lambda c: c.segment(slot=-1), r"segment.slot=-1: 0 to"),
    "a slot beyond the cache": (lambda c: c.segment(slot=9), r"segment.slot=9: 0 to"),
    "a negative prefix": (lambda c: c.segment(prefix=-1), "segments follow each other"),
    "a segment beyond the rows": (lambda c: c.segment(num_rows=5, seen=None), "hold 5 of 4 rows"),
    "rows without a segment": (lambda c: c.segment(num_rows=3, seen=None), "hold 3 of 4 rows"),
    "a mask of another shape": (lambda c: c.segment(tail=1), r"segment.seen is \[4, 4\]"),
    "a mask of another type": (lambda c: c.segment(seen=torch.ones(4, 4)), "of torch.float32: bool"),
    "a wanted row beyond": (lambda c: c.batch.wanted.append(4), "batch.wanted holds 4"),
    "a position beyond the model": (lambda c: c.batch.positions.__setitem__(1, 10**8), "batch.positions holds 1000000"),
    "a negative position": (lambda c: c.batch.positions.__setitem__(1, -3), "batch.positions holds -3"),
    "positions missing": (lambda c: c.batch.positions.pop(), "4 tokens and 3 positions"),
    "no rows": (lambda c: setattr(c, "batch", PackedBatch()), "0 tokens"),
    "layers beyond the model": (lambda c: setattr(c, "span", Span(0, 99)), "span.last=99"),
    "entering rows missing": (lambda c: entering(c, torch.zeros(3, c.model.config.hidden_size)), "span.entering_TD is"),
    "entering rows too narrow": (lambda c: entering(c, torch.zeros(4, 32)), "span.entering_TD is"),
    "entering whole numbers": (lambda c: entering(c, torch.zeros(4, c.model.config.hidden_size).int()), "torch.int32"),
    "a tap above the span": (lambda c: setattr(c, "span", replace(c.span, taps=(0,))), r"span.taps=\(0,\)"),
    "tapped rows beyond": (lambda c: setattr(c, "span", replace(c.span, taps=(1,), tap_rows=[7])), "span.tap_rows"),
    "more than the vocabulary": (lambda c: setattr(c, "top", 10**6), "top=1000000"),
    "thresholds missing": (lambda c: plan(c, thresholds=[0.1]), "plan.thresholds has 1 entries"),
    "odd blocks": (lambda c: plan(c, blocks=blocks(size=5)), "plan.blocks.size=5"),
    "blocks kept that are not": (lambda c: plan(c, blocks=blocks(keep=(3,))), "plan.blocks.keep=3"),
    "blocks for other segments": (lambda c: plan(c, blocks=blocks(keep=(0, 0))), "2 entries for 1 segments"),
    "means of another shape": (lambda c: plan(c, blocks=blocks()), r"plan.blocks.summaries\(0\) is \[1\]"),
    "sets of nobody's": (
        lambda c: plan(c, blocks=blocks(sets="per_row")),
        "plan.blocks.sets='per_row': one of per_head",
    ),
    "a score of another name": (lambda c: plan(c, blocks=blocks(score="median")), "plan.blocks.score='median' with"),
    "exact scores of means": (lambda c: plan(c, blocks=blocks(score="exact")), "plan.blocks.score='exact' with"),
    "bounds without any": (lambda c: plan(c, blocks=blocks(score="bounds", summaries=None)), "'bounds' without"),
    "another model's cache": (other_cache, "give it a cache of its own"),
    # by one: where the check ends, foreign memory begins
    "the first token that is none": (lambda c: c.batch.tokens.__setitem__(2, c.model.vocab_size), "token 8192 is not"),
    "one row too many": (lambda c: c.segment(prefix=c.cache.capacity - 3), "reserve them before the forward"),
    "no room after a tail": (
        lambda c: c.segment(prefix=c.cache.capacity - 4, tail=1, seen=None),
        "reserve them before the forward",
    ),
    "the first slot that is none": (lambda c: c.segment(slot=c.cache.num_slots), "segment.slot=1: 0 to 0"),
    "the first position that is none": (
        lambda c: c.batch.positions.__setitem__(1, c.model.max_length),
        "batch.positions holds",
    ),
    "one layer too many": (lambda c: setattr(c, "span", Span(0, c.model.num_layers + 1)), "span.last="),
    "one more than the vocabulary": (lambda c: setattr(c, "top", c.model.vocab_size + 1), "top=8193"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_forward_is_refused(name: str) -> None:
    spoil, message = SPOILT[name]
    case = Case()
    case.run()  # sound so far
    spoil(case)
    with pytest.raises(ValueError, match=message):
        case.run()


def test_a_token_beyond_the_embedding_is_the_inputs_fault() -> None:
    case = Case()
    case.batch.tokens[1] = case.model.vocab_size + 10**6
    with pytest.raises(InputError, match="is not in the model's embedding, which has"):
        case.run()


def test_two_segments_of_one_slot_are_refused() -> None:
    case = Case()
    case.batch.add_chunk(case.slot, 0, [3, 4], wanted=1)
    with pytest.raises(ValueError, match="each has a slot of its own"):
        case.run()


def test_entering_states_may_have_the_models_dtype() -> None:
    """They were read as float32 whatever they were."""
    model = target()
    case = Case()
    half = model.num_layers // 2
    case.span = Span(0, half, taps=(half,))
    hidden = case.run().hidden[half].to(torch.bfloat16)
    case.span = Span(half, model.num_layers, hidden.float())
    expected = case.run().logits_MV.clone()
    case.span = Span(half, model.num_layers, hidden)
    assert torch.equal(case.run().logits_MV, expected)


def test_a_forward_is_checked_through_the_language_model_too() -> None:
    model = target()
    cache = model.new_cache(1)
    batch = PackedBatch()
    batch.add_chunk(cache.acquire(), 0, [1, 10**7], wanted=1)
    with pytest.raises(InputError, match="token 10000000"):
        model.forward(batch, DensePlan(cache, batch))


def linear(outputs: int, inputs: int, bias: int | None = None) -> Projection:
    return Projection(torch.zeros(outputs, inputs), None if bias is None else torch.zeros(bias))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_end_norm_D": torch.ones(63)}, r"block.mlp_end_norm_D is \[63\]: \[64\]"),
        ({"attention_norm_D": torch.ones(2, 32)}, r"block.attention_norm_D is \[2, 32\]: \[64\]"),
        ({"q_norm_d": torch.ones(64), "k_norm_d": torch.ones(64)}, r"block.q_norm_d is \[64\]: \[128\]"),
        ({"q_norm_d": torch.ones(128), "k_norm_d": None}, "k_norm_d is missing"),
        ({"rotary": 1}, "block.rotary=1: 0 to 0"),
        ({"q": linear(64, 64)}, r"block.q is \[64, 64\]: \[128, 64\]"),
        ({"k": linear(128, 64)}, r"block.k is \[128, 64\]: \[64, 64\]"),
        ({"v": linear(64, 32)}, r"block.v is \[64, 32\]: \[64, 64\]"),
        ({"opening": linear(64, 64)}, r"block.opening is \[64, 64\]: \[128, 64\]"),
        ({"out": linear(64, 64)}, r"block.out is \[64, 64\]: \[64, 128\]"),
        ({"q": linear(128, 64, bias=64)}, r"block.q has a bias \[64\]: \[128\]"),
        ({"gate": linear(128, 64), "up": linear(128, 64)}, "block.up has 128 outputs: a multiple of 32, at most 96"),
        ({"gate": linear(64, 64)}, r"block.gate is \[64, 64\]: \[96, 64\]"),
        ({"up": linear(96, 32)}, r"block.up is \[96, 32\]: \[96, 64\]"),
        ({"down": linear(64, 64)}, r"block.down is \[64, 64\]: \[64, 96\]"),
        ({"down": linear(64, 96, bias=96)}, r"block.down has a bias \[96\]: \[64\]"),
        ({"up": None}, "block.gate stands alone: an MLP has up and down"),
        ({"gate": None, "down": None}, "block.up stands alone"),
        ({"mlp_shift_D": torch.ones(96)}, r"block.mlp_shift_D is \[96\]: \[64\]"),
        ({"q_norm_d": torch.ones(2, 32)}, r"block.q_norm_d is \[2, 32\]: \[32\]"),
        ({"parallel": True, "mlp_end_norm_D": torch.ones(64)}, "no norms after the branches"),
        ({"q": linear(128, 64)._replace(scale=torch.ones(64))}, r"block.q has a scale \[64\]: \[128\]"),
        ({"down": linear(64, 96)._replace(scale=2.0)}, "block.down has a scale: native code multiplies nothing there"),
        ({"gate": None, "up": linear(96, 64)._replace(scale=2.0)}, "block.up has a scale"),
    ],
)
def test_a_block_that_does_not_fit_its_layout_is_refused(changes: dict[str, Any], message: str) -> None:
    layout = selftest._layout(torch.float32, None)
    layout = replace(layout, blocks=[replace(each, **changes) for each in layout.blocks])
    library = build.library()
    assert library is not None
    with pytest.raises(ValueError, match=message):
        NativeDecoder(layout, library)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 6}, "experts.chosen=6: 1 to 5"),
        ({"chosen": 0}, "experts.chosen=0: 1 to 5"),
        ({"groups": 5, "open_groups": 6}, "experts.open_groups=6: 1 to 5"),
        ({"groups": 5, "chosen": 2}, "experts.chosen=2: 1 to 1"),
        ({"up": Projection(torch.zeros(5 * 48, 64))}, "experts.width=48: a multiple of 32"),
        ({"router_ED": torch.zeros(5, 96)}, r"experts.router_ED is \[5, 96\]: \[5, 64\]"),
        ({"gate": Projection(torch.zeros(5 * 64, 64))}, r"experts.gate is \[320, 64\]: \[160, 64\]"),
        ({"down": Projection(torch.zeros(5 * 64, 64))}, r"experts.down is \[320, 64\]: \[320, 32\]"),
    ],
)
def test_experts_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    layout = selftest._uncommon(selftest._layout(torch.float32, None), None)
    first, second = layout.blocks
    assert isinstance(second, Block)
    assert second.experts is not None
    second = replace(second, experts=replace(second.experts, **changes))
    library = build.library()
    assert library is not None
    with pytest.raises(ValueError, match=message):
        NativeDecoder(replace(layout, blocks=[first, second]), library)


def test_thresholds_of_gates_are_refused_where_there_are_experts() -> None:
    library = build.library()
    assert library is not None
    layout = selftest._uncommon(selftest._layout(torch.float32, None), None)
    decoder, cache, batch = NativeDecoder(layout, library), KVCache(2, 1, 16), PackedBatch()
    cache.reserve(cache.acquire(), 1)
    batch.add_chunk(0, 0, [3], wanted=1)
    with pytest.raises(ValueError, match="a gated MLP in every layer, and no experts"):
        decoder.forward(batch, NativePlan(cache, thresholds=[0.1]), Span(0, 2), top=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": linear(50, 32)}, r"layout.head is \[50, 32\]: \[50, 64\]"),
        ({"head": linear(50, 64, bias=49)}, r"layout.head has a bias \[49\]: \[50\]"),
        ({"embedding_VD": torch.zeros(50, 32)}, r"layout.embedding_VD is \[50, 32\] of torch.float32: \[50, 64\]"),
        ({"embedding_VD": torch.zeros(50, 64).double()}, "of torch.float64"),
        ({"final_norm_D": torch.ones(32)}, r"layout.final_norm_D is \[32\]: \[64\]"),
    ],
)
def test_a_layout_that_does_not_fit_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    library = build.library()
    assert library is not None
    with pytest.raises(ValueError, match=message):
        NativeDecoder(replace(selftest._layout(torch.float32, None), **changes), library)


# ---------------------------------------------------------------- by one, without a forward


def sizes() -> checks.Sizes:
    return checks.Sizes(2, 64, [(2, 16)] * 2, 2, 16, 50, 50, max_length=100, dtype=torch.float32, gated=True)


def chunk(prefix: int, rows: int = 1) -> PackedBatch:
    batch = PackedBatch()
    batch.add_chunk(0, prefix, [3] * rows, wanted=1)
    return batch


def refused(message: str | None) -> Any:
    return nullcontext() if message is None else pytest.raises(ValueError, match=message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 3, 16), None),
        ((2, 2, 9, 16), None),
        ((0, 2, 3, 16), r"\[0, 2, 3, 16\]"),
        ((1, 1, 3, 16), r"\[1, 1, 3, 16\]"),
        ((1, 2, 2, 16), r"\[1, 2, 2, 16\]"),  # the third block's would lie beyond
        ((1, 2, 3, 15), r"\[1, 2, 3, 15\]"),
        ((2, 3, 16), r"\[2, 3, 16\]"),
    ],
)
def test_there_is_a_summary_of_every_block(shape: tuple[int, ...], message: str | None) -> None:
    with refused(message):
        checks.check_summaries(sizes(), chunk(48).segments, blocks(), {0: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("keep", "sets", "message"),
    [(2, "per_head", None), (1, "per_head", "keep=1: 2 to 4"), (1, "per_layer", "keep=1: 2 to 4"), (1, "global", None)],
)
def test_every_head_that_selects_for_itself_keeps_a_block(keep: int, sets: str, message: str | None) -> None:
    cache = KVCache(2, 1, 100)
    cache.acquire()
    plan = NativePlan(cache, blocks=blocks(keep=(keep,), sets=sets))
    with refused(message):
        checks.check(sizes(), chunk(32), plan, Span(0, 2))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ((0, 3), None),
        ((0, 4), "prefix.length=4: 0 to 3"),
        ((0, -1), "prefix.length=-1"),
        ((1, 0), "prefix.slot=1: 0 to 0"),
    ],
)
def test_only_committed_rows_of_another_cache_are_read(prefix: tuple[int, int], message: str | None) -> None:
    cache = KVCache(1, 2, 100)
    cache.commit(cache.acquire(), range(3))
    with refused(message):
        check_prefixes([prefix], cache, 1)
    with pytest.raises(ValueError, match="1 of 2 segments"):
        check_prefixes([(0, 3)], cache, 2)


@pytest.mark.parametrize(("most", "message"), [(2, None), (3, "prefetch.most=3: 1 to 2"), (0, "prefetch.most=0")])
def test_a_chain_ends_where_positions_do(most: int, message: str | None) -> None:
    cache = KVCache(1, 1, 200)
    cache.reserve(cache.acquire(), 200)
    reach = SimpleNamespace(most=most, stands=[1.0], temperature=0.0, uniforms=[])
    with refused(message):
        check_chain(sizes(), chunk(98), cache, 50, 50, None, [reach], 1)


@pytest.mark.parametrize(
    ("count", "message"), [(33, None), (48, None), (32, "head.vocab_size=32: 33 to 48"), (49, "head.vocab_size=49")]
)
def test_a_head_has_no_tiles_to_spare(count: int, message: str | None) -> None:
    packed = tiled(torch.zeros(33, 64)).contiguous()
    with refused(message):
        checks.check_head(packed, packed, count, 1)
