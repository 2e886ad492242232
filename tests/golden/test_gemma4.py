"""Gemma 4's text models: heads of two sizes, layers that share keys and values, inputs of each layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.models.load import load
from helpers.golden import LayerPlan, Session, tokens_of
from helpers.tiny_models import VOCAB_SIZE, load_eager, save_model


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
