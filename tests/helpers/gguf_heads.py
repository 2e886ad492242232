"""GGUF files of draft heads as llama.cpp's converter writes them, from tensors under the names of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{
        f"{ours}_conv.kernel_projection": f"{theirs}_conv_proj"
        for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
    },
    **{f"{ours}_conv.base_kernel": f"{theirs}_conv_base" for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))},
}
_OUTER = {
    "fc": "fc",
    "norm": "output_norm",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}


def save(
    path: Path, kind: str, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], heads: tuple[int, int]
) -> Path:
    """Write a file.

    Args:
        kind: the architecture, eagle3 or dflash.
        fields: beyond those of every head, with their types' defaults of the writer.
        heads: of queries, and of keys.
    """
    writer = gguf.GGUFWriter(str(path), kind)
    for name, value in fields.items():
        full = name if "." in name and name.startswith("tokenizer") else f"{kind}.{name}"
        whole = isinstance(value, int) and not isinstance(value, bool)
        of = gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(full, value, of, sub_type=inner)
    last = {}
    for name, value in tensors.items():
        data = value.numpy()
        if name == "d2t":
            last["d2t"] = data + np.arange(len(data))
            continue
        if name == "t2d":
            continue
        if "_codebook" in name:
            writer.add_tensor(f"selector_{name.split('.')[1].removesuffix('_codebook')}.weight", data)
            continue
        module, _, leaf = name.rpartition(".")
        if name.endswith("base_kernel"):
            module, leaf = name, ""
        if not name.startswith("layers."):
            writer.add_tensor(f"{_OUTER[module]}.{leaf}", data)
            continue
        _, number, inside = module.split(".", 2)
        if kind == "eagle3" and inside in ("self_attn.q_proj", "self_attn.k_proj"):
            count = heads[inside.endswith("k_proj")]
            data = data.reshape(count, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(f"blk.{number}.{_LAYER[inside]}.{leaf}".rstrip("."), np.ascontiguousarray(data))
    for name, data in last.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
