"""A Llama checkpoint as a GGUF file, weights bit for bit, so that llama.cpp can be measured on the same model.

What differs between the two layouts:

* llama.cpp rotates neighbouring pairs (0, 1), (2, 3), ... of a head where the library rotates (0, D/2), (1, D/2 + 1),
  ..., so the rows of the query and key weights are re-ordered within each head;
* YaRN is described by factor and original length; its two betas are llama.cpp's own, 32 and 1;
* norms are float32 there; everything else keeps its bfloat16, float16 or float32 bits;
* a tied head is simply absent.

The tokenizer is written for byte-level BPE only: tokens, merges, special tokens, and the chat template, so that
llama.cpp's server can answer. The pre-tokenizer has no general translation: ``pre`` names llama.cpp's nearest one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, UnsupportedArchitecture

INSTALL = "pip install 'foretoken-lab[peers]'"
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def export(model: Any, tokenizer: Any, path: str | Path) -> Path:
    """Write a Llama model of transformers as GGUF.

    Args:
        model: ``LlamaForCausalLM``; its weights are written in the dtype they have.
        tokenizer: its tokenizer; may have fewer entries than the model's vocabulary.
        path: the file to write.
    Returns:
        the path.
    Raises:
        ConfigError: the package ``gguf`` is not installed.
        UnsupportedArchitecture: not a plain Llama layout, or not a byte-level BPE tokenizer.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"writing GGUF needs the package gguf: {INSTALL}") from None
    config = model.config
    _check(config)
    path = Path(path)
    writer = gguf.GGUFWriter(str(path), "llama")
    kind = {
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.float32: gguf.LlamaFileType.ALL_F32,
    }[model.dtype]
    writer.add_file_type(kind)
    add_metadata(writer, config, tokenizer, gguf, model.generation_config)
    for name, tensor in _tensors(model):
        _add_tensor(writer, name, tensor, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: Any, config: Any, tokenizer: Any, gguf: Any, generation_config: Any = None) -> None:
    """Give a writer all that a file says of a Llama and its tokenizer.

    Args:
        writer, gguf: the package's.
        generation_config: with the end tokens; None: the config has them.
    """
    writer.add_name(writer.path.stem)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(config.rope_parameters["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(config.rope_parameters["original_max_position_embeddings"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, tokenizer, config, generation_config or config, gguf)


def _check(config: Any) -> None:
    reasons = {
        f"architecture '{config.model_type}'": config.model_type != "llama",
        f"rope type '{(config.rope_parameters or {}).get('rope_type')}'": config.model_type == "llama"
        and not _has_known_rotary(config.rope_parameters),
        "biases": bool(getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)),
    }
    for what, present in reasons.items():
        if present:
            raise UnsupportedArchitecture(f"GGUF export writes the plain Llama layout only, not {what}")


def _has_known_rotary(parameters: dict[str, Any]) -> bool:
    if parameters.get("rope_type") == "yarn":  # of its settings, those that llama.cpp derives as the library does
        return set(parameters) <= {"rope_type", "rope_theta", "factor", "original_max_position_embeddings"}
    return parameters.get("rope_type") == "default"


def interleave_heads(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key weight in llama.cpp's rotary order.

    Within a head of width D, row i and row i + D/2 become rows 2i and 2i + 1.

    Args:
        weight: [num_heads * D, width].
        num_heads: query heads for the query weight, key/value heads for the key weight.
    """
    rows, width = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, width).transpose(1, 2).reshape(rows, width)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its GGUF name."""
    config = model.config
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in _OUTER_NAMES:
            yield _OUTER_NAMES[name], tensor
            continue
        part = name.removeprefix("model.layers.").removesuffix(".weight")
        layer, _, part = part.partition(".")
        if part not in _LAYER_NAMES:
            raise UnsupportedArchitecture(
                f"GGUF export writes the plain Llama layout only: it has no place for '{name}'"
            )
        if part in heads:
            tensor = interleave_heads(tensor, heads[part])
        yield f"blk.{layer}.{_LAYER_NAMES[part]}.weight", tensor


def _add_tensor(writer: Any, name: str, tensor: Tensor, gguf: Any) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dim() == 1:
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:
        # numpy has no bfloat16: its bytes are handed over as they are
        data = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any, generation_config: Any, gguf: Any) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    if described["model"]["type"] != "BPE" or described["model"].get("byte_fallback"):
        raise UnsupportedArchitecture("GGUF export writes byte-level BPE tokenizers only")
    text_of = {index: text for text, index in tokenizer.get_vocab().items()}
    special = {entry["id"] for entry in described["added_tokens"] if entry["special"]}
    tokens, kinds = [], []
    for index in range(config.vocab_size):
        text = text_of.get(index)
        tokens.append(f"[PAD{index}]" if text is None else text)
        if text is None:
            kinds.append(gguf.TokenType.UNUSED)
        else:
            kinds.append(gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(described))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    ends = getattr(generation_config, "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if ends:
        writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[1])
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(False)  # the chat template writes it
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(described: Any) -> str:
    """llama.cpp's name for the split before merging: GPT-2's pattern, with or without digits one by one."""
    before = described.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    digits = any(part.get("type") == "Digits" and part.get("individual_digits") for part in parts)
    return "smollm" if digits else "gpt-2"
