"""Small checkpoints that bring a next-token-prediction layer, in the layouts in which such checkpoints are published.

The library's own model with one layer more is saved; its last layer becomes the prediction layer: the config names one
layer less, and norms and projection lie next to it. So the names of the decoder layer are the library's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.tiny_models import Family, save_model

LAYERS, WIDTH, VOCABULARY = 2, 48, 101
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
PREFIX = f"model.layers.{LAYERS}."
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_SHARING = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS + 1,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
FAMILIES = {
    "deepseek_v3": Family("deepseek_v3", _LATENT),
    "glm4_moe_lite": Family("glm4_moe_lite", {**_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "glm4_moe": Family("glm4_moe", {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_next": Family("qwen3_next", _SHARING),
    "qwen3_5_text": Family("qwen3_5_text", _SHARING),
    "qwen3_5_moe_text": Family("qwen3_5_moe_text", _SHARING),
}
QWEN = tuple(name for name in FAMILIES if name.startswith("qwen"))  # norms store w of 1 + w
_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
    "eh_proj": "mtp.fc",
}


def named(family: str, name: str) -> str:
    """How a family calls a tensor of the layer that is called so after the layers of DeepSeek-V3."""
    if family not in QWEN:
        return f"{PREFIX}{name}"
    part = name.removesuffix(".weight")
    return f"{_QWEN[part]}.weight" if part in _QWEN else f"mtp.layers.0.{name}"


def save_mtp(name: str, folder: Path, *, knowing: bool = False) -> Path:
    """A checkpoint of a layout.

    Args:
        knowing: layers add nothing, and the projection hands the token on: both the target's distribution and the
            layer's are that of the last token alone, so that every draft stands.
    """
    save_model(FAMILIES[name], folder)
    generator = torch.Generator().manual_seed(3)

    qwen = name in QWEN
    unit = 0.0 if qwen else 1.0  # of a norm that does nothing, as it is stored

    def gain() -> Tensor:
        return torch.full((WIDTH,), unit) if knowing else unit + 0.2 * torch.randn(WIDTH, generator=generator)

    def change(tensors: dict[str, Tensor]) -> None:
        if qwen:
            for each in [each for each in tensors if each.startswith(PREFIX)]:
                tensors[named(name, each.removeprefix(PREFIX))] = tensors.pop(each)
        noise = torch.randn(WIDTH, 2 * WIDTH, generator=generator) / (2 * WIDTH) ** 0.5
        tensors[named(name, "eh_proj.weight")] = torch.eye(WIDTH, 2 * WIDTH) if knowing else noise
        for part in ("enorm", "hnorm", "shared_head.norm"):
            tensors[named(name, f"{part}.weight")] = gain()
        if not qwen:
            tensors[f"{PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{PREFIX}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        if knowing:
            tensors["model.norm.weight"] = torch.full((WIDTH,), unit)
            for each in tensors:
                if "o_proj" in each or "down_proj" in each or "linear_attn.out_proj" in each:
                    tensors[each].zero_()

    retensor(folder, change)
    reconfig(folder, num_hidden_layers=LAYERS, **({} if qwen else {"num_nextn_predict_layers": 1}))
    return folder


def retensor(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change a checkpoint's tensors in place."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def reconfig(folder: Path, **fields: object) -> None:
    """Change fields of a checkpoint's config; lists of what each layer is are cut to its layers."""
    config = {**json.loads((folder / CONFIG).read_text()), **fields}
    for name, value in config.items():
        if isinstance(value, list) and len(value) == LAYERS + 1:
            config[name] = value[: config["num_hidden_layers"]]
    (folder / CONFIG).write_text(json.dumps(config))


def shard(folder: Path) -> None:
    """Split a checkpoint: the prediction layer lies in a file of its own, as in the large ones."""
    tensors = load_file(folder / WEIGHTS)
    parts = {
        "model-00001-of-00002.safetensors": {n: v for n, v in tensors.items() if not n.startswith(PREFIX)},
        "model-00002-of-00002.safetensors": {n: v for n, v in tensors.items() if n.startswith(PREFIX)},
    }
    for name, part in parts.items():
        save_file(part, folder / name, {"format": "pt"})
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
