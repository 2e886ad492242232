"""Embeddings that stay in the blocks of a file: the rows of the dense table, in PyTorch and in native code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.forward.stored_embedding import StoredEmbedding, dtype_of, is_plain_embedding
from foretoken.forward.stored_weight import StoredWeight
from foretoken.native import build
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Layout, MLPBlock, Projection
from helpers.stored_weights import random_stored

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TOKENS = (7, 0, 39, 7, 21)


@pytest.mark.parametrize("scale", [None, 2.5])
def test_tokens_become_the_rows_of_the_dense_table(scale: float | None) -> None:
    stored = random_stored("Q4_1", 40, 64)
    table = StoredEmbedding(stored, None if scale is None else torch.tensor(scale))
    tokens = torch.tensor([[3, 39], [0, 3]])
    expected = nn.functional.embedding(tokens, stored.dense()) * (scale or 1.0)
    assert torch.equal(table(tokens), expected)
    assert torch.equal(table.weight, stored.dense())
    assert is_plain_embedding(table)
    assert dtype_of(table) == torch.float32
    assert not list(table.parameters())


def layout(embedding_VD: Tensor | StoredWeight) -> Layout:
    generator = torch.Generator().manual_seed(0)

    def weight(outputs: int, inputs: int) -> Projection:
        return Projection(torch.randn(outputs, inputs, generator=generator) / inputs**0.5)

    return Layout(
        dtype=torch.float32,
        width=256,
        heads=1,
        kv_heads=1,
        head_dim=16,
        mlp_width=64,
        norm_eps=1e-6,
        scaling=1.0,
        num_blocks=1,
        blocks=[MLPBlock(weight(64, 256), weight(256, 64), torch.ones(256))],
        rotary=lambda positions_N: (torch.empty(len(positions_N), 0), torch.empty(len(positions_N), 0)),
        max_length=16,
        final_norm_D=torch.ones(256),
        head=weight(40, 256),
        embedding_VD=embedding_VD,
        embedding_scale=3.0,
    )


def logits(embedding_VD: Tensor | StoredWeight) -> Tensor:
    library = build.library()
    if library is None:
        pytest.skip("no C compiler on this machine")
    decoder, cache, batch = NativeDecoder(layout(embedding_VD), library), KVCache(1, 1, 16), PackedBatch()
    cache.reserve(cache.acquire(), len(TOKENS))
    batch.add_chunk(0, 0, TOKENS, wanted=len(TOKENS))
    return decoder.forward(batch, NativePlan(cache), Span(0, 1), top=0).logits_MV.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_native_forwards_look_up_the_same_rows(kind: str) -> None:
    stored = random_stored(kind, 40, 256)
    assert torch.equal(logits(stored), logits(stored.dense()))
    assert not torch.equal(logits(stored), logits(stored.rows(torch.arange(39, -1, -1)).dense()))
