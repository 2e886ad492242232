"""Timing plans against each other: the forwards, their order, and their contexts."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.bench.table import terminal_table
from foretoken.core.errors import ConfigError
from foretoken.forward import attention
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.methods.sparse.attention import SparseAttention
from foretoken.methods.sparse.blocks import BlockRule
from foretoken.models.language_model import LanguageModel
from foretoken_lab.timing.verification import Prefix, measure, quartiles, sheets


@pytest.fixture(params=["fused", "layers"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=1200,
    )
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention.NAME
    )
    found = LanguageModel(network.eval(), None, name="tiny")
    if request.param == "layers":
        found.native_decoder = None
    return found


def test_every_plan_runs_on_the_same_rows_in_a_rotating_order(model: LanguageModel) -> None:
    order: list[tuple[str, int, int]] = []
    logits: dict[tuple[str, int, int], torch.Tensor] = {}

    def watched(label: str):
        def make(cache: KVCache, batch: PackedBatch) -> DensePlan:
            (segment,) = batch.segments
            assert segment.verification
            assert len(batch.wanted) == len(batch)
            key = (label, segment.prefix, segment.num_rows)
            order.append(key)
            logits[key] = model.forward(batch, DensePlan(cache, batch)).logits_MV.clone()
            return DensePlan(cache, batch)

        return make

    tokens = [5 + number % 40 for number in range(700)]
    timings = measure(
        Prefix(model, tokens), {"a": watched("a"), "b": watched("b")}, contexts=[640, 30], rows=[4], repeats=3
    )
    assert [(each.plan, each.context, len(each.seconds)) for each in timings] == [
        ("a", 30, 3),
        ("b", 30, 3),
        ("a", 640, 3),
        ("b", 640, 3),
    ]
    for each in timings:
        assert all(0 < inside < whole for inside, whole in zip(each.attention_seconds, each.seconds, strict=True))
    warm_up, first = order[:4], order[4:10]
    assert [label for label, *_ in warm_up] == ["a", "a", "b", "b"]
    assert [label for label, *_ in first] == ["a", "b", "b", "a", "a", "b"]
    with torch.inference_mode():
        expected = model.forward(*_alone(model, tokens[:644])).logits_MV[-4:]
    torch.testing.assert_close(logits["a", 640, 4], expected, rtol=0, atol=1e-4)


def _alone(model: LanguageModel, tokens: list[int]) -> tuple[PackedBatch, DensePlan]:
    cache = model.new_cache(1)
    batch = PackedBatch()
    batch.add_chunk(cache.acquire(), 0, tokens, wanted=len(tokens))
    cache.reserve(0, len(tokens))
    return batch, DensePlan(cache, batch)


def test_a_random_prefix_is_as_long_and_not_the_texts(model: LanguageModel) -> None:
    tokens = [7] * 1100
    prefix = Prefix(model, tokens, random=True)
    prefix.grow(600)
    prefix.grow(1000)
    assert prefix.cache.lengths == [1000]
    for buffer in (*prefix.cache.keys, *prefix.cache.values):
        assert buffer is not None
        assert torch.isfinite(buffer[0, :, :1000]).all()
        assert buffer[0, :, 600:1000].std() > 0.9
    sparse = SparseAttention(BlockRule(budget=0.2, dense_below=0, size=16))
    assert len(measure(prefix, {"sparse": sparse}, contexts=[1000], rows=[2, 5], repeats=1)) == 2


def test_a_context_that_the_model_does_not_hold_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="more than the 1200 positions of model 'tiny'"):
        measure(Prefix(model, [5] * 1300), {"dense": DensePlan}, contexts=[1195], rows=[6], repeats=1)


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_tables_compare_with_the_first_plan_of_each_setting_and_fit_80_columns():
    def timed(context, plan, seconds, repeats=20):
        facts = {"context": context, "rows": 8, "plan": plan, "seconds": seconds, "attention_seconds": seconds / 2}
        ends = {"seconds_lower": 0.9 * seconds, "seconds_upper": 1.1 * seconds, "repeats": repeats}
        return {**facts, **ends, "read": 0.5, "flops": 1e9, "bytes": 1e6}

    plans = ("dense", "sparse+verification.budget=0.2+verification.block=16")
    results = [timed(context, plan, factor) for context in (200, 4096) for factor, plan in enumerate(plans, start=1)]
    results.append(timed(8192, "dense", 0.5, repeats=1))
    times, work = sheets(results)
    assert [row[5].text for row in times.rows] == ["1.00x", "0.50x", "1.00x", "0.50x", "1.00x"]
    assert [row[5].bad for row in times.rows] == [False, True, False, True, False]
    assert [row[4].text for row in times.rows][-2:] == ["1800.00–2200.00", "–"]  # once is no spread
    assert [row[0].text for row in work.rows] == ["200", "", "4096", "", "8192"]
    for sheet in (times, work):
        buffer = io.StringIO()
        Console(file=buffer, width=80).print(terminal_table(sheet))
        assert max(map(len, buffer.getvalue().splitlines())) <= 80
