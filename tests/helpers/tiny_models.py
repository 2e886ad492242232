"""Checkpoints with random weights, small enough to build in a test: two or three layers, windows of five positions.

Weights are drawn wide (not at the library's 0.02), so that attention is peaked and a wrong mask shows in the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers import decoders as tokenizer_decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 101
WINDOW = 5

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA = {**_GROUPED, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 12}
_ALTERNATING = ["sliding_attention", "full_attention"]


def _rope(kind: str, **others: Any) -> dict[str, Any]:
    return {**_GROUPED, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **others}}


@dataclass(frozen=True)
class Family:
    """A model type and the options that make it small; ``windowed`` says that a window of five is in force."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=lambda: _GROUPED)
    windowed: bool = False


_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "llama_odd_heads": Family("llama", {**_GROUPED, "hidden_size": 48, "head_dim": 12}),
    "llama_multi_query": Family("llama", {**_COMMON, "num_key_value_heads": 1}),
    "llama_rope_llama3": Family(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama_rope_yarn": Family("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama_rope_linear": Family("llama", _rope("linear", factor=4.0)),
    "mistral": Family("mistral", {**_GROUPED, "sliding_window": WINDOW}, windowed=True),
    "mixtral": Family(
        "mixtral",
        {**_GROUPED, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        windowed=True,
    ),
    "qwen2": Family("qwen2"),
    "qwen2_window": Family(
        "qwen2",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        windowed=True,
    ),
    "qwen3": Family("qwen3", {**_GROUPED, "head_dim": 16}),
    "qwen3_window": Family(
        "qwen3",
        {
            **_GROUPED,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        windowed=True,
    ),
    "qwen3_moe": Family(
        "qwen3_moe", {**_GROUPED, "head_dim": 16, "num_experts": 4, **_EXPERTS, "moe_intermediate_size": 32}
    ),
    "qwen2_moe": Family("qwen2_moe", {**_GROUPED, "num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS}),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW}, windowed=True),
    "olmoe": Family("olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": Family("gemma", {**_GROUPED, "head_dim": 16}),
    "gemma2": Family(
        "gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}, windowed=True
    ),
    "gemma3_text": Family("gemma3_text", {**_GEMMA, "layer_types": 2 * _ALTERNATING}, windowed=True),
    "gpt_neox": Family("gpt_neox"),
    "gpt2": Family("gpt2", {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gpt_bigcode": Family(
        "gpt_bigcode", {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}
    ),
    "phi": Family("phi"),
    "phi3": Family("phi3", {**_GROUPED, "sliding_window": WINDOW}, windowed=True),
    "smollm3": Family("smollm3"),
    "gpt_oss": Family(
        "gpt_oss",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
        windowed=True,
    ),
    "deepseek_v2": Family("deepseek_v2", _LATENT),
    "deepseek_v3": Family("deepseek_v3", _LATENT),
    "cohere": Family("cohere"),
    "cohere2": Family("cohere2", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW}, windowed=True),
    "granite": Family("granite"),
    "granitemoe": Family("granitemoe", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": Family("stablelm", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "starcoder2": Family("starcoder2", {**_GROUPED, "sliding_window": WINDOW}, windowed=True),
    "opt": Family("opt", {**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": 64}),
    "ernie4_5": Family("ernie4_5"),
    "gemma3n_text": Family(
        "gemma3n_text",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": 2 * _ALTERNATING,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        windowed=True,
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {
            **_GROUPED,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": 2 * _ALTERNATING,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 32,
        },
        windowed=True,
    ),
    "glm": Family("glm", {**_GROUPED, "head_dim": 12}),
    "glm4": Family("glm4", {**_GROUPED, "head_dim": 12}),
    "exaone4": Family(
        "exaone4",
        {**_GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": 2 * _ALTERNATING},
        windowed=True,
    ),
    "nemotron": Family("nemotron"),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", {**_GROUPED, "head_dim": 16, "num_experts": 4, "moe_topk": 2}),
}


_STATES = {  # of Bamba and its kin
    **_GROUPED,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LIMITED = {"time_step_limit": (0.3, 0.9)}
_IN_PLACE = {  # mixers that began as attentions: a group for every head, rotary over whole heads
    **_STATES,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 4,
    "mamba_n_groups": 4,
    "mamba_expand": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "tie_word_embeddings": True,
}
_GRANITE = {
    **_STATES,
    "shared_intermediate_size": 64,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_MAMBA2 = {
    **{name: value for name, value in _COMMON.items() if name != "max_position_embeddings"},
    "state_size": 16,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "chunk_size": 8,
}
_MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4, "eos_token_id": 2}
_ZAMBA2 = {
    **_GROUPED,
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "n_mamba_heads": 8,
    "mamba_headdim": 16,
    "chunk_size": 8,
    "adapter_rank": 8,
    "use_mem_rope": True,
}
_NEMOTRON_H = {
    **_GROUPED,
    "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

# layers with states in the place of attention, or next to it
STATE_SPACE: dict[str, Family] = {
    "mamba2": Family("mamba2", _MAMBA2),
    "mamba2_groups": Family("mamba2", {**_MAMBA2, "n_groups": 2, "use_bias": True}),
    "mamba2_limits": Family("mamba2", {**_MAMBA2, **_LIMITED}),
    "bamba": Family("bamba", {**_STATES, "attn_layer_indices": [1]}),
    "bamba_groups": Family("bamba", {**_STATES, **_LIMITED, "attn_layer_indices": [0], "mamba_n_groups": 2}),
    "bamba_for_attention": Family("bamba", _IN_PLACE),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {**_GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid_dense": Family(
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "nope",
        },
    ),
    "granitemoehybrid_rope": Family(
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
        },
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            **_STATES,
            "mamba_d_ssm": 128,
            "mamba_n_groups": 2,
            "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.8,
            "key_multiplier": 0.5,
            "mlp_multipliers": [0.9, 0.7],
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
        },
    ),
    "falcon_h1_norm": Family(
        "falcon_h1", {**_STATES, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_d_ssm": 128}
    ),
    "zamba2": Family("zamba2", _ZAMBA2),
    "nemotron_h": Family("nemotron_h", _NEMOTRON_H),
    "nemotron_h_dense": Family(
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "mlp_bias": True},
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_5_text": Family("qwen3_5_text", _DELTA),
    "olmo_hybrid": Family("olmo_hybrid", {**_DELTA, "linear_value_head_dim": 32}),
    "mamba": Family("mamba", _MAMBA),
    "falcon_mamba": Family("falcon_mamba", _MAMBA),
    "jamba": Family(
        "jamba", {**_GROUPED, "num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    ),
    "lfm2": Family(
        "lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "conv_L_cache": 4}
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {
            **_GROUPED,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw every weight anew: matrices of gain about one, norms near one, biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias")):  # states that last some rows, and differ by head
                weight.copy_(0.5 * noise - 0.5)
            elif weight.dim() < 2:
                level = 1.0 if "norm" in name.lower() and name.endswith("weight") and weight.mean() > 0.5 else 0.0
                weight.copy_(level + 0.2 * noise)
            else:
                weight.copy_(noise * (1.5 / weight.shape[-1] ** 0.5 if "embed" not in name else 0.7))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4's
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def save_model(
    family: Family | str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Build a family's small model with random weights and save it with a tokenizer; returns the folder."""
    if isinstance(family, str):
        family = FAMILIES[family] if family in FAMILIES else STATE_SPACE[family]
    config = AutoConfig.for_model(family.model_type, **{**family.options, **options})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, edit: Callable[[dict[str, int]], None] | None = None) -> None:
    """One token per printable character: 95 of them, two of layout, and four special ones are 101."""
    names = ["<unk>", "<s>", "</s>", "<pad>", "\n", "\t", *map(chr, range(32, 127))]
    vocab = {name: index for index, name in enumerate(names)}
    if edit is not None:
        edit(vocab)
    inner = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizer_decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)


def load_eager(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The library's own model with its plainest attention: the reference."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()
