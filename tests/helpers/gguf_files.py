"""GGUF files to read: written with the package ``gguf``, quantised by it or by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from foretoken.models.gguf.library import MAPPED

if MAPPED:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

_ARCHITECTURES = {  # where the library has another name
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_PARAMETERS = {  # without an ending of their own in the library
    "self_attn.sinks": ("attn_sinks", "weight"),
    "linear_attn.A_log": ("ssm_a", ""),
    "linear_attn.dt_bias": ("ssm_dt", "bias"),
    "mlp.e_score_correction_bias": ("exp_probs_b", "bias"),
}
_INTERLEAVED = ("llama", "granite")
PLAIN = ("_inp", "conv1d", "shortconv.conv")  # in names of matrices that are not quantised


def save(model: Any, path: Path, *, kind: str | None = None, fields: Mapping[str, Any] | None = None) -> Path:
    """A small model of the library, float32 or quantised, with a tokenizer of bytes; named as llama.cpp names tensors.

    Args:
        kind: what matrices are quantised to; None: they stay.
        fields: numbers of its architecture beyond the sizes, without its name.
    """
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    fields = dict(fields or {})
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in fields:
        writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rotary["rope_theta"])
    epsilon = next((each for each in ("norm_eps", "norm_epsilon", "layer_norm_eps") if hasattr(config, each)), None)
    if epsilon is None or architecture == "lfm2":
        writer.add_layer_norm_rms_eps(getattr(config, epsilon or "rms_norm_eps"))
    else:
        writer.add_layer_norm_eps(getattr(config, epsilon))
    for name, value in fields.items():
        _add(writer, f"{architecture}.{name}", value)
    add_byte_tokenizer(writer, config.vocab_size)
    number_of = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(number_of[architecture], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = weight.detach().float().numpy()
        module, _, last = name.rpartition(".")
        if module.endswith("mlp.experts"):  # one tensor for the gates and one for the other factors
            leaf = "bias" if last.endswith("_bias") else "weight"
            if architecture == "gpt-oss" and leaf == "weight":
                data = data.swapaxes(1, 2)
            halves = (data[:, ::2], data[:, 1::2]) if architecture == "gpt-oss" else np.split(data, 2, 1)
            parts = {"down": data} if last.startswith("down") else dict(zip(("gate", "up"), halves, strict=True))
            for part, stack in parts.items():
                number = gguf.GGMLQuantizationType[kind if kind and leaf == "weight" else "F32"]
                place = f"blk.{module.split('.')[2]}.ffn_{part}_exps.{leaf}"
                writer.add_tensor(place, gguf.quantize(np.ascontiguousarray(stack), number), raw_dtype=number)
            continue
        alone = _PARAMETERS.get(".".join(name.split(".")[3:]))
        place = names.get_name(module) if alone is None else f"blk.{name.split('.')[2]}.{alone[0]}"
        last = last if alone is None else alone[1]
        if architecture in MAPPED:
            data = _as_stored(GGUF_ARCHS[architecture](config), f"{place}.{last}".rstrip("."), data)
        if place.endswith("ffn_gate_inp_shexp") and data.ndim > 1:
            data = data[0]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(place.split(".")[-1])
        if heads is not None and architecture in _INTERLEAVED:  # rows 0, D/2, 1, D/2 + 1, … of every head
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if place.endswith("norm") and last == "weight" and architecture.startswith(("gemma", "nemotron")):
            data = data + 1
        plain = kind is None or data.ndim == 1 or any(each in place for each in PLAIN)
        number = gguf.GGMLQuantizationType["F32" if plain else kind]
        writer.add_tensor(f"{place}.{last}".rstrip("."), gguf.quantize(data, number), raw_dtype=number)
    return finish(writer, path)


def _as_stored(mapping: list[Any], name: str, data: Any) -> Any:
    """What the library's conversions of a tensor would make the given data of."""
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    pattern = rename_source_key(name, renamings, converters)[1]
    used = next((each.operations for each in converters if pattern in each.source_patterns), [])
    for operation in reversed(used):
        what = type(operation).__name__
        if what == "SubtractOne":
            data = data + 1
        elif what == "LogNegate":
            data = -np.exp(data)
        elif what == "Unsqueeze":
            data = data.squeeze(operation.dim)
        else:
            permuted, first = data.copy(), getattr(operation, "offset", 0)
            index = operation.permutation.numpy() + first
            if what == "TiledToGroupedInputs":
                permuted[:, index] = data
            else:
                permuted[index] = data[first:]
            data = permuted
    return data


def add_byte_tokenizer(writer: Any, size: int) -> None:
    """Four special tokens, the 256 bytes, one merge and a token of its, and padding."""
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *bytes_to_unicode().values(), "he"]
    kinds = [3] * 4 + [1] * 257
    tokens += [f"[PAD{index}]" for index in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [5] * (len(tokens) - len(kinds)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)


def rewrite(
    source: Path,
    target: Path,
    *,
    kind: str | Callable[[str], str | None] | None = None,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """A copy of a file, with other contents.

    Args:
        kind: what matrices are quantised to, or a function of their names; None: they stay.
        fields: text, numbers or lists that replace the file's, or are added; None as a value takes one away.
        tensors: arrays of float32 that replace the file's, or are added; None as a value takes one away.
        split_max_tensors: of one piece, each a file; 0: there is one file.
    """
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture, split_max_tensors=split_max_tensors)
    fields, tensors = dict(fields or {}), dict(tensors or {})
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in fields:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, value in fields.items():
        if value is not None:
            _add(writer, name, value)
    for tensor in reader.tensors:
        if tensor.name in tensors:
            continue
        to = kind(tensor.name) if callable(kind) else kind
        if to is None or len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        number = gguf.GGMLQuantizationType[to]
        dense = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(dense, number), raw_dtype=number)
    for name, value in tensors.items():
        if value is not None:
            writer.add_tensor(name, value)
    return finish(writer, target)


def finish(writer: Any, path: Path) -> Path:
    """Write the added tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(path: Path, fields: dict[str, Any]) -> Path:
    """A file of fields alone, without those that are None."""
    writer = gguf.GGUFWriter(str(path), fields["general.architecture"])
    for name, value in fields.items():
        if value is not None and name != "general.architecture":
            _add(writer, name, value)
    return finish(writer, path)


def _add(writer: Any, name: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    kind = gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
    inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
    writer.add_key_value(name, value, kind, sub_type=inner)
