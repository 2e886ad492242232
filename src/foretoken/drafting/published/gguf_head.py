"""Draft heads in GGUF files of llama.cpp, as a config and tensors of the speculators format.

    eagle3    one block of EAGLE-3
    dflash    DFlash; with ``markov_w1`` DSpark, with ``selector_hidden`` DFlash2

Numbers of layers count inputs in both. llama.cpp writes the tokens of a draft vocabulary themselves and not their
offsets, and the rows of an eagle3's queries and keys in the order of its own rotation.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.drafting.published.blocks import block_type
from foretoken.models.gguf.architecture import ROTARY_FACTORS, halves_first, scaled_rotary
from foretoken.models.gguf.blocks import check_places, dense
from foretoken.models.gguf.container import GGUFFile
from foretoken.models.gguf.fields import Fields

_NAMES = json.loads((Path(__file__).parent / "gguf_names.json").read_text(encoding="utf-8"))
"""Of each architecture: our names of outer tensors and of a layer's, and the fields of the config's keys."""

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)(\.\w+)?")


def gguf_head(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a head, quantised ones as float32.

    Raises:
        ModelError: the file is damaged, or holds something else.
    """
    file = GGUFFile(path)
    check_places(file)
    fields = Fields(file)
    kind = fields.architecture
    if kind not in _NAMES:
        raise ModelError(f"model '{path}' is of architecture {kind!r:.40}: heads are of {' and '.join(_NAMES)}")
    tensors = {_name(path, kind, name): _value(file, name) for name in file.entries if name != ROTARY_FACTORS}
    if kind == "eagle3":
        head_dim = _head_dim(fields)
        for part in ("q", "k"):
            for name in [each for each in tensors if f"{part}_proj." in each]:
                tensors[name] = tensors[name][halves_first(len(tensors[name]) // head_dim, head_dim)]
    return _config(file, fields, tensors), tensors


def _name(path: Path, kind: str, name: str) -> str:
    outer, inner, found = _NAMES[kind]["outer"], _NAMES[kind]["layer"], _LAYER.fullmatch(name)
    if found is not None and found[2] in inner:
        return f"layers.{found[1]}.{inner[found[2]]}{found[3] or ''}"
    if name not in outer:
        raise ModelError(f"model '{path}': its tensor {name!r:.80} has no place in a head of {kind}")
    return outer[name]


def _value(file: GGUFFile, name: str) -> Tensor:
    entry = file.entries[name]
    if name != "d2t":
        return dense(file, entry)
    tokens_K = file.bytes_of(entry, entry.count * 8).clone().view(torch.int64)
    return tokens_K - torch.arange(len(tokens_K))


def _head_dim(fields: Fields) -> int:
    width, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    return fields.size("attention.key_length", absent=max(1, width // heads))


def _config(file: GGUFFile, fields: Fields, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind, layers, head_dim = fields.architecture, fields.size("block_count"), _head_dim(fields)
    ids = fields.field("extract_layers" if "extract_layers" in fields else "target_layers", list)
    whole = len(tensors.get("embed_tokens.weight", file.fields.get("tokenizer.ggml.tokens", ())))
    whole = whole or fields.size("vocab_size")
    block = {
        "model_type": block_type(tensors),
        "vocab_size": whole,
        "hidden_size": fields.size("embedding_length"),
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": fields.size("attention.head_count"),
        "num_key_value_heads": fields.size("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope_parameters": scaled_rotary(file, fields, head_dim),
        "max_position_embeddings": fields.size("context_length"),
        "attention_bias": any(name.endswith("q_proj.bias") for name in tensors),
    }
    if "attention.sliding_window" in fields:
        pattern = file.fields.get(f"{kind}.attention.sliding_window_pattern", [True] * layers)
        block["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
        block["sliding_window"] = fields.size("attention.sliding_window")
    markov = tensors.get("markov_head.markov_w1.weight")
    model_type = kind if markov is None else "dspark"
    config = {
        "speculators_model_type": model_type,
        "speculators_config": {"algorithm": model_type, "verifier": {"name_or_path": f"an unnamed target ({kind})"}},
        "transformer_layer_config": block,
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else whole,
        f"{'eagle_' * (kind == 'eagle3')}aux_hidden_state_layer_ids": ids,
        "mask_token_id": file.fields.get("tokenizer.ggml.mask_token_id"),
        **{key: file.fields[f"{kind}.{name}"] for key, name in _NAMES[kind]["config"].items() if name in fields},
    }
    if markov is not None:
        config = {"sample_from_anchor": True, **config, "markov_rank": markov.shape[-1]}
    return {**config, "is_causal": False} if "selector_rank" in fields else config
