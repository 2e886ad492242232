"""Checkpoints of a shape: drawn and written piece by piece, and whole for the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken_lab.models import shapes


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_several_files_is_one_model(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.Shape(64, 2, 96, 4, 2, 512, head_dim=16, tied=tied))
    monkeypatch.setattr(shapes, "_SHARD", 40_000)
    count = shapes.write_random_model("tiny", tmp_path, "bfloat16")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert count == sum(each.numel() for each in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=model.dtype))
    drawn = model.model.layers[1].mlp.up_proj.weight
    assert 0.01 < float(drawn.detach().std()) < 0.03
    assert model.config.num_hidden_layers == 2


def test_families_start_as_the_library_starts_them(tmp_path: Path) -> None:
    """Gemma's norms are 1 + weight: they begin at zero."""
    config = shapes.config_of("gemma3-100m", "float32")
    config.num_hidden_layers, config.vocab_size = 1, 64
    tensors = dict(shapes.random_tensors(config, torch.float32))
    assert not tensors["model.norm.weight"].any()
    assert tensors["model.embed_tokens.weight"].any()
    assert "lm_head.weight" not in tensors
