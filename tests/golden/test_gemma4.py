"""Gemma 4's text models: heads of two sizes, layers that share keys and values, inputs of each layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.models.load import load
from foretoken.models.memory import bytes_of_token
from foretoken.native import build
from helpers.golden import LayerPlan, Session, tokens_of
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, Family, load_eager, save_model


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_have_none_in_the_cache(family: str, tmp_path: Path) -> None:
    model = load(save_model(family, tmp_path), device="cpu")
    assert model.kv_sources == {2: 0, 3: 1}
    session = Session(model, plan=LayerPlan)
    slot, tokens = session.cache.acquire(), tokens_of(1, 20, VOCAB_SIZE)
    session.chunk(slot, tokens[:9], wanted=1)
    found = session.chunk(slot, tokens[9:])
    assert [keys is None for keys in session.cache.keys] == [False, False, True, True]
    assert session.cache.committed(3, slot)[0] is not session.cache.committed(1, slot)[0]
    assert torch.equal(session.cache.committed(3, slot)[0], session.cache.committed(1, slot)[0])
    with torch.inference_mode():
        expected = load_eager(tmp_path)(torch.tensor([tokens])).logits[0, 9:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_text_models_of_the_unified_family_run_natively(tmp_path: Path) -> None:
    shared = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    family = Family("gemma4_unified_text", {**FAMILIES["gemma4_text"].options, **shared})
    model = load(save_model(family, tmp_path), device="cpu")
    assert (model.native_decoder is None) == (build.library() is None)
    tokens, session = tokens_of(1, 20, VOCAB_SIZE), Session(model)
    found = session.chunk(session.cache.acquire(), tokens)
    with torch.inference_mode():
        torch.testing.assert_close(found, load_eager(tmp_path)(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=1e-4)


def test_a_mixture_runs_on_the_general_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    model = load(save_model("gemma4_text", tmp_path, num_kv_shared_layers=0, **experts), device="cpu")
    assert model.native_decoder is None
    assert "its experts stand next to an MLP, each with norms of its own" in caplog.text
    tokens = tokens_of(1, 20, VOCAB_SIZE)
    session = Session(model)
    found = session.chunk(session.cache.acquire(), tokens)
    with torch.inference_mode():
        torch.testing.assert_close(found, load_eager(tmp_path)(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=1e-4)


def test_keys_of_layers_of_several_sizes_are_counted(tmp_path: Path) -> None:
    model = load(save_model("gemma4_text", tmp_path), device="cpu")
    session = Session(model, max_slots=1)
    session.chunk(session.cache.acquire(), tokens_of(1, 20, VOCAB_SIZE))
    assert session.cache.num_bytes == session.cache.capacity * bytes_of_token(model.config, bytes_of_value=4)
