"""Counted FLOPs against torch's own counter over the library's model, and what an evaluation makes of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.load import load
from foretoken.models.work import sizes
from helpers.tiny_models import save_model

ROWS = 7


# tied and untied tables, biases, learnt positions, experts of which a row meets some
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "mixtral"])
def test_the_count_is_that_of_torch_without_attention(family, tmp_path):
    folder = save_model(family, tmp_path)
    library = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        library(torch.arange(1, 1 + ROWS)[None], use_cache=False)
    products = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in products.items() if "bmm" in str(op))
    ours = sizes(library)
    expected = sum(products.values()) - attention
    assert ours.flops(library.config.num_hidden_layers * ROWS, ROWS) == pytest.approx(expected, rel=1e-6)


def test_a_model_counts_its_rows(tmp_path):
    model = load(save_model("llama", tmp_path), device="cpu")
    cache, before = model.new_cache(1), model.flops
    batch = PackedBatch()
    cache.reserve(cache.acquire(), ROWS)
    batch.add_chunk(0, 0, list(range(1, 1 + ROWS)), wanted=2)
    model.forward(batch, DensePlan(cache, batch))
    assert model.flops - before == sizes_of(model).flops(model.num_layers * ROWS, 2)
    assert model.reading_flops(ROWS) == sizes_of(model).flops(model.num_layers * ROWS, 0)


def sizes_of(model):
    return model.sizes
