"""Random models of the families that the native decoder knows, each next to the library's own eager twin."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.forward import attention
from foretoken.models.adoption import fit
from foretoken.models.language_model import LanguageModel
from foretoken.models.linear_layers import use_linear_layers
from foretoken.models.quantised.rounding import round_weights

COMMON = {
    "vocab_size": 101,  # not a multiple of a tile
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.1 * each for each in range(8)],
    "long_factor": [4.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 150,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.11,
    "logits_scaling": 4.0,
}
_ALTERNATING = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_TWO = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
_SCORED = {
    "n_routed_experts": 5, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    **_SCORED, "n_routed_experts": 12, "num_experts": 12, "n_group": 4, "topk_group": 2, "num_key_value_heads": 6,
    "head_dim": 16, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
_GEMMA4 = {
    "num_hidden_layers": 5,
    "sliding_window": 21,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 64,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, one group": ("llama", {"num_key_value_heads": 1, "head_dim": 64}),
    "llama, no groups": ("llama", {"num_key_value_heads": 6}),
    "llama, odd width": ("llama", {"head_dim": 48}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama, llama3 rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, squared ReLU": ("llama", {"hidden_act": "relu2"}),
    "llama, biased MLP": ("llama", {"mlp_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "mistral, window": ("mistral", {"sliding_window": 21}),
    "qwen2": ("qwen2", {}),
    "qwen2, mixed windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 18,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3, windows": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 18,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {"head_dim": 48}),
    "phi3, window, part of a head": ("phi3", {"sliding_window": 21, "rope_parameters": _PARTIAL}),
    "phi3, longrope": ("phi3", {"head_dim": 16, "rope_parameters": _LONGROPE}),
    "granite": ("granite", _GRANITE),
    "olmo2": ("olmo2", {}),
    "olmo3, two rotaries": ("olmo3", {"rope_parameters": _TWO, **_ALTERNATING}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**_ALTERNATING, **_CAPS, "query_pre_attn_scalar": 12}),
    "gemma3": ("gemma3_text", {**_ALTERNATING, "query_pre_attn_scalar": 12, "rope_parameters": _TWO}),
    "gemma3, capped logits": ("gemma3_text", {**_ALTERNATING, "final_logit_softcapping": 3.0}),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "sliding_window": 21,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16},
        },
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"rope_parameters": _ALPHA}),
    "exaone4": ("exaone4", {**_ALTERNATING, "sliding_window_pattern": 2}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone_moe": ("exaone_moe", {**_ALTERNATING, **_SCORED, "num_shared_experts": 1}),
    "olmo": ("olmo", {}),
    "gpt_oss": ("gpt_oss", {**_ALTERNATING, **_LOCAL, "rope_parameters": _YARN}),
    "glm4_moe": ("glm4_moe", {**_SCORED, "use_qk_norm": True}),
    "glm4_moe, groups": ("glm4_moe", {**_SCORED, "n_routed_experts": 12, "n_group": 4, "topk_group": 2}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "rope_parameters": {**_YARN, "mscale_all_dim": 1.0}}),
    "deepseek_v3, halves": ("deepseek_v3", {**_LATENT, "rope_interleave": False, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "youtu": ("youtu", {**_LATENT, "q_lora_rank": None}),
    "dots1": ("dots1", {**_SCORED}),
    "solar_open": ("solar_open", {**_SCORED}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"num_experts": 5, "moe_topk": 2, "intermediate_size": 64, "rope_parameters": _ALPHA},
    ),
    "afmoe": (
        "afmoe",
        {
            **_ALTERNATING,
            **_EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "minimax_m2": ("minimax_m2", {**_LOCAL, "rotary_dim": 16, "rope_parameters": _PARTIAL}),
    "ministral": ("ministral", _ALTERNATING),
    "seed_oss": ("seed_oss", {}),
    "cwm": ("cwm", _ALTERNATING),
    "helium": ("helium", {"head_dim": 16}),
    "mixtral": ("mixtral", _LOCAL),
    "mixtral, window": ("mixtral", {**_LOCAL, "sliding_window": 21}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen3_moe, dense layers between": (
        "qwen3_moe",
        {**_EXPERTS, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "qwen3_moe, many experts": (
        "qwen3_moe",
        {**_EXPERTS, "num_experts": 40, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
    ),
    "olmoe": ("olmoe", {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "granitemoe": ("granitemoe", {**_GRANITE, **_LOCAL}),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, **_LOCAL, "shared_intermediate_size": 96}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 96, "mlp_only_layers": [1]}),
    "gpt_neox": ("gpt_neox", {"num_attention_heads": 3, "rope_parameters": _QUARTER}),
    "gpt_neox, one after the other": (
        "gpt_neox",
        {"num_attention_heads": 3, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
    "phi": ("phi", {"head_dim": 16, "rope_parameters": _PARTIAL}),
    "stablelm": ("stablelm", {"head_dim": 16, "rope_parameters": _QUARTER, "use_qkv_bias": True}),
    "stablelm, parallel, heads normed": (
        "stablelm",
        {"head_dim": 16, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 21}),
    "opt": ("opt", {"num_key_value_heads": 6, "head_dim": 16, "ffn_dim": 160, "word_embed_proj_dim": 96}),
    "gpt2": ("gpt2", {"num_key_value_heads": 6, "n_inner": 160}),
    "nemotron": ("nemotron", {"mlp_bias": True}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere, heads normed": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", _ALTERNATING),
    "gemma4, shared keys and inputs": ("gemma4_text", _GEMMA4),
    "gemma4, values are keys": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "vaultgemma": ("vaultgemma", {**_ALTERNATING, **_CAPS, "query_pre_attn_scalar": 12}),
}


def twins(family: str, kind_of_weights: torch.dtype | str) -> tuple[Any, Any]:
    """A random model of transformers that attends by a plan, and the library's own eager twin of it.

    Args:
        kind_of_weights: "int8" or "int4": both have rounded weights, and the rest in bfloat16.
    """
    kind, options = FAMILIES[family]
    dtype = torch.bfloat16 if isinstance(kind_of_weights, str) else kind_of_weights
    config = AutoConfig.for_model(kind, **{**COMMON, **options})
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape))
            else:  # peaked attention: a wrong mask must show
                weight.copy_(torch.randn(weight.shape) * (0.5 if weight.ndim == 1 else 2.5 / weight.shape[-1] ** 0.5))
        for name, buffer in reference.named_buffers():
            if "correction" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape))
            elif "layer_scalar" in name:
                buffer.copy_(0.5 + torch.rand(buffer.shape))
    own = copy.deepcopy(config)  # from_config notes the attention implementation in it
    twin = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation=attention.NAME).eval()
    twin.load_state_dict(reference.state_dict())
    for each in (reference, twin):
        use_linear_layers(each)
    if isinstance(kind_of_weights, str):
        for each in (reference, twin):
            round_weights(each, kind_of_weights, family)
    return twin, reference


def make(family: str, kind_of_weights: torch.dtype | str, *, kv_cache_dtype: str = "auto") -> tuple[LanguageModel, Any]:
    """The same after the native decoder."""
    twin, reference = twins(family, kind_of_weights)
    model = LanguageModel(twin, None, name=family, kv_cache_dtype=kv_cache_dtype)
    assert model.native_decoder is not None, fit.misfit(twin)
    return model, reference


def text(count: int, seed: int = 1) -> list[int]:
    return torch.randint(4, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(reference: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens]), use_cache=False).logits[0].float()


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, in units of the logits' own spread."""
    return float((ours.float() - theirs).abs().max() / theirs.std())
