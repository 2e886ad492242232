"""GGUF files of every architecture that is read: logits of the original, and of the library's reading, in float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")

from foretoken import LLM, SamplingParams  # noqa: E402
from foretoken.core.errors import UnsupportedArchitecture  # noqa: E402
from foretoken.forward.quantised_experts import QuantisedExperts  # noqa: E402
from foretoken.forward.quantised_weight import QuantisedLinear  # noqa: E402
from foretoken.models.gguf.families import FAMILIES  # noqa: E402
from foretoken.models.gguf.library import MAPPED  # noqa: E402
from foretoken.models.load import load, load_as_is  # noqa: E402
from foretoken.native import build  # noqa: E402
from foretoken.native.packing import TiledLinear  # noqa: E402
from helpers import gguf_files  # noqa: E402
from helpers.tiny_models import randomise  # noqa: E402

SIZES = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 5
LIBRARY = ("lfm2", "qwen35", "qwen35moe")  # read with transformers' own mappings, from 5.23 on
IDS = torch.randint(4, 260, (1, 20), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Case:
    """A small model and the fields of its file.

    Attributes:
        options: of the config, beyond the sizes.
        fields: of the file, beyond the sizes.
        misread: why transformers' own reading computes something else; "": it does not.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    misread: str = ""


_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_DELTA_SIZES = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**_HALF, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
_DELTA = {
    "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 64, "rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8,
}  # fmt: skip
_GRANITE = {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.0}
CASES = {
    "llama": Case("llama"),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", misread="it reads no width of heads, and fails"),
    "qwen2moe": Case(
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [],
            "shared_expert_intermediate_size": 96, "norm_topk_prob": False,
        },
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 96,
        },
        misread="it takes the library's widths of experts",
    ),
    "qwen3moe": Case(
        "qwen3_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
        misread="it takes the library's width of experts",
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96,
            "attention.sliding_window": WINDOW, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
        misread="it looks for experts under names that llama.cpp does not write",
    ),
    "minimax-m2": Case(
        "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "rope_parameters": _HALF},
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "rope.dimension_count": 8,
            "expert_gating_func": 2,
        },
        misread="it looks for the bias of scores under another name",
    ),
    "lfm2": Case(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0]},
    ),
    "qwen35": Case("qwen3_5_text", _DELTA_SIZES, _DELTA),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        {
            **_DELTA_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
        {
            **_DELTA, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 96,
        },
    ),
    "gemma": Case("gemma", {"tie_word_embeddings": True}, misread="it does not read gemma"),
    "gemma2": Case(
        "gemma2",
        {
            "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0, "tie_word_embeddings": True,
        },
        {"attention.sliding_window": WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        misread="it reads neither soft caps nor the scale of scores",
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "num_hidden_layers": 7, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"attention.sliding_window": WINDOW, "rope.scaling.factor": 4.0},
        misread="it reads neither the scaling of the rotary embedding nor the scale of scores",
    ),
    "phi3": Case(
        "phi3", {"sliding_window": WINDOW, "rope_parameters": _HALF},
        {"attention.sliding_window": WINDOW, "rope.dimension_count": 8},
        misread="it reads neither the window nor the share of a head that is rotated",
    ),
    "granite": Case(
        "granite",
        {
            "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
        _GRANITE,
        misread="it does not read granite",
    ),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "stablelm": Case(
        "stablelm", {"use_qkv_bias": True, "rope_parameters": _HALF}, {"rope.dimension_count": 8},
        misread="it takes the library's share of a head that is rotated, a quarter",
    ),
    "nemotron": Case(
        "nemotron", {"rope_parameters": _HALF, "attention_bias": True}, {"rope.dimension_count": 8},
        misread="it reads neither the epsilon of these norms nor the share of a head that is rotated",
    ),
    "glm4": Case(
        "glm4", {"rope_parameters": _HALF, "attention_bias": True}, {"rope.dimension_count": 8},
        misread="it does not read glm4",
    ),
}  # fmt: skip


def original(case: Case) -> Any:
    config = AutoConfig.for_model(case.model_type, **{**SIZES, **case.options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_every_architecture_has_a_case() -> None:
    assert set(CASES) == {*FAMILIES, *LIBRARY}


# transformers reads these, and this project not: encoders and decoders, or families that it does not serve natively or
# on the general path, or of which transformers reads a part of the sizes only
LEFT_OUT = {"t5", "umt5", "falcon", "bloom", "mamba", "gpt2", "gemma4", "deci"}


def test_what_transformers_reads_is_read_or_refused_by_name(tmp_path: Path) -> None:
    theirs = {name.replace("_moe", "moe") for name in GGUF_CONFIG_MAPPING} - {"general", "tokenizer", "mistral"}
    theirs = {{"gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}.get(name, name) for name in theirs}
    assert theirs <= {*CASES, *LEFT_OUT}
    for name in LEFT_OUT:
        path = gguf_files.vocabulary(tmp_path / f"{name}.gguf", {"general.architecture": name})
        with pytest.raises(
            UnsupportedArchitecture, match=rf"architecture '{name}', which is not read: llama, .* folder"
        ):
            load_as_is(path)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LIBRARY or name in MAPPED])
def test_a_file_computes_what_its_original_does(name: str, tmp_path: Path) -> None:
    model = original(CASES[name])
    path = gguf_files.save(model, tmp_path / "x.gguf", fields=CASES[name].fields)
    read = load_as_is(path).model
    assert read.config.model_type == CASES[name].model_type
    expected = logits(model)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(read), expected, rtol=1e-5, atol=1e-5)
    if not CASES[name].misread:
        library = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
        torch.testing.assert_close(logits(read), logits(library), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LIBRARY or name in MAPPED])
def test_the_engine_serves_a_quantised_file(name: str, tmp_path: Path) -> None:
    """Matrices stay in blocks, and greedy tokens are those of the library's model with the same values."""
    case = CASES[name]
    model = original(case)
    path = gguf_files.save(model, tmp_path / "x.gguf", kind="Q8_0", fields=case.fields)
    read = load_as_is(path).model
    packed = [module for module in read.modules() if isinstance(module, QuantisedLinear)]
    plain = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(packed) == sum(linear.weight.shape[0] > 1 for linear in plain)  # a gate of one number is no matrix
    mixtures = sum(isinstance(module, QuantisedExperts) for module in read.modules())
    assert mixtures == sum(module.endswith("mlp.experts") for module, _ in model.named_modules())
    ids = IDS
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, read(ids).logits[:, -1:].argmax(-1)], dim=1)
    llm = LLM(str(path), dtype="float32", kv_cache_dtype="float32", speculative_config={"method": "suffix"})
    assert (llm.target.native_decoder is None) == (build.library() is None)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    (out,) = llm.generate([{"prompt_token_ids": IDS[0].tolist()}], params)
    assert out.token_ids == ids[0, IDS.shape[1] :].tolist()


@pytest.mark.skipif("qwen35" not in MAPPED or build.library() is None, reason="needs transformers 5.23, and a compiler")
def test_steps_of_delta_nets_may_stay_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of few bits keep these few rows as they were: native code has them after the quantised ones."""
    case = CASES["qwen35"]
    model = original(case)
    monkeypatch.setattr(gguf_files, "PLAIN", (*gguf_files.PLAIN, "ssm_alpha", "ssm_beta"))
    read = load(gguf_files.save(model, tmp_path / "x.gguf", kind="Q4_0", fields=case.fields), dtype="float32")
    mixer = read.model.model.layers[0].linear_attn
    assert type(mixer.in_proj_a) is torch.nn.Linear
    assert read.native_decoder is not None
    assert isinstance(mixer.in_proj_qkv, TiledLinear)


@pytest.mark.parametrize("field", ["attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa"])
def test_a_field_of_another_architecture_is_refused(field: str, tmp_path: Path) -> None:
    path = gguf_files.save(original(CASES["llama"]), tmp_path / "x.gguf", fields={field: 3.0})
    with pytest.raises(UnsupportedArchitecture, match=rf"its field 'llama.{field}' is 3.0, which is not computed"):
        load_as_is(path)
