"""The prediction layer of a GGUF file of Qwen3.5: the values that were stored, and drafts with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.methods.mtp.gguf_layer import gguf_layer
from foretoken.methods.mtp.layouts import LAYOUTS
from foretoken.models.gguf.library import MAPPED
from helpers.gguf_files import rewrite, save

pytestmark = pytest.mark.skipif("qwen35" not in MAPPED, reason="this transformers does not map Qwen3.5's files")
LAYERS, WIDTH = 4, 64
OPTIONS = {
    "vocab_size": 288, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": [*["linear_attention"] * 3, *["full_attention"] * 2],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96,
}  # fmt: skip
FIELDS = {
    "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 64, "rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8,
    "nextn_predict_layers": 1,
}  # fmt: skip
EXPERT_FIELDS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 96,
}  # fmt: skip
NORMS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5_moe_text"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, Any]]:
    """The library's model with one layer more, its file, and the tensors around that layer."""
    moe, folder = "moe" in request.param, tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **OPTIONS, **(EXPERTS if moe else {})))
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(torch.randn_like(each) * (0.2 if each.dim() < 2 or "A_log" in name else each.shape[-1] ** -0.5))
    whole = save(model, folder / "whole.gguf", fields={**FIELDS, **(EXPERT_FIELDS if moe else {})})
    around = {each: 0.2 * torch.randn(WIDTH) for each in NORMS}
    around["eh_proj"] = torch.randn(WIDTH, 2 * WIDTH) / WIDTH**0.5
    stored = {f"blk.{LAYERS}.nextn.{n}.weight": (v + 1 if n in NORMS else v).numpy() for n, v in around.items()}
    return model, rewrite(whole, folder / "mtp.gguf", tensors=stored), around


def test_the_values_are_those_of_the_checkpoint(made: tuple[Any, Path, dict[str, Any]]) -> None:
    model, path, around = made
    found = gguf_layer(path, LAYOUTS[model.config.model_type])
    expected = {f"layers.0.{name}": value for name, value in model.model.layers[LAYERS].state_dict().items()}
    expected |= {f"{NORMS[name]}.weight": around[name] for name in NORMS} | {"fc.weight": around["eh_proj"]}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_the_file_drafts_for_itself(made: tuple[Any, Path, dict[str, Any]]) -> None:
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    texts = []
    for recipe in (None, {"method": "mtp", "num_speculative_tokens": 3}):
        (found,) = LLM(str(made[1]), device="cpu", speculative_config=recipe).generate(["Tom has"], params)
        texts.append(found.token_ids)
    assert texts[0] == texts[1]
    assert found.metrics.num_draft_tokens > 5


def test_a_file_without_the_layer_is_refused(made: tuple[Any, Path, dict[str, Any]], tmp_path: Path) -> None:
    name = f"blk.{LAYERS}.nextn.eh_proj.weight"
    without = rewrite(made[1], tmp_path / "without.gguf", tensors={name: None})
    with pytest.raises(ModelError, match=f"has no next-token-prediction layer: there is no tensor {name}"):
        gguf_layer(without, LAYOUTS[made[0].config.model_type])
