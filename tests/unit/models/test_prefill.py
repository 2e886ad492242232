"""Prompts in chunks: the cache afterwards equals that of one forward over all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.load import load
from foretoken.models.prefill import chunks, prefill
from helpers.golden import tokens_of
from helpers.tiny_models import VOCAB_SIZE, save_model


def test_chunks_report_their_position_and_commit_one_by_one(tmp_path: Path) -> None:
    model = load(save_model("llama", tmp_path), device="cpu")
    tokens = tokens_of(0, 11, VOCAB_SIZE)
    cache = model.new_cache(1)
    slot = cache.acquire()
    found, logits = [], []
    last_five = [max(0, min(end - begin, end - 6)) for begin, end in ((0, 4), (4, 8), (8, 11))]
    for begin, end, batch in chunks(cache, slot, tokens, rows=4, wanted=lambda begin, end: last_five[begin // 4]):
        assert cache.lengths[slot] == begin
        found.append((begin, end, len(batch.wanted)))
        logits.append(model.forward(batch, DensePlan(cache, batch)).logits_MV)
    assert found == [(0, 4, 0), (4, 8, 2), (8, 11, 3)]
    assert cache.lengths[slot] == len(tokens)
    cache.rollback(slot, 0)
    for _, _, whole in chunks(cache, slot, tokens, wanted=lambda begin, end: 5):
        expected_MV = model.forward(whole, DensePlan(cache, whole)).logits_MV
    torch.testing.assert_close(torch.cat(logits), expected_MV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513])
def test_a_prompt_read_in_chunks_is_the_prompt(length: int, tmp_path: Path) -> None:
    model = load(save_model("llama", tmp_path, max_position_embeddings=1024), device="cpu")
    tokens = tokens_of(1, length + 1, VOCAB_SIZE)
    logits = []
    for parts in ((length,), (length // 3, length - length // 3)):
        cache, begin = model.new_cache(1), 0
        slot = cache.acquire()
        for count in parts:
            prefill(model, cache, slot, tokens[begin : begin + count])
            begin += count
        assert cache.lengths[slot] == length
        cache.reserve(slot, 1)
        batch = PackedBatch()
        batch.add_chunk(slot, length, tokens[length:], wanted=1)
        logits.append(model.forward(batch, DensePlan(cache, batch)).logits_MV)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
