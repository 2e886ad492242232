"""``shape:100m``: Llama shapes with random weights. Their texts mean nothing, their times are those of the shape.

``shape:mamba-100m`` is a Mamba-2, ``shape:hybrid-100m`` Mamba-2 and attention layers in the layout of Bamba;
``shape:gemma3-100m`` and its neighbours are of the families that they are named after, ``shape:moe-100m`` is a Mixtral
of which a row goes through as much as through ``shape:100m``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.core.errors import ConfigError, nearest
from foretoken.core.files import folder_made_once

PREFIX = "shape:"
# width, layers, MLP width, query heads, key/value heads, vocabulary; heads are 64 wide, embeddings tied
SHAPES = {
    "16m": (384, 8, 1024, 6, 2, 8192),
    "100m": (768, 12, 2048, 12, 4, 32000),
    "500m": (1280, 24, 3840, 20, 4, 32000),
    # draft models with large vocabularies: the head is most of the memory read for a draft token
    "draft32k": (768, 4, 2048, 12, 4, 32000),
    "draft152k": (1024, 4, 2816, 16, 4, 151936),
}

# options of a family's config next to those that all of them have
FAMILY_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-100m": (
        "gemma3_text",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "intermediate_size": 2304,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "phi3-100m": (
        "phi3",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "intermediate_size": 2048,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
        },
    ),
    "moe-100m": (  # eight experts of half the MLP's width in "100m", two for a row
        "mixtral",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "intermediate_size": 1024,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
}
_FAMILY_VOCABULARY = 32000


# width, layers, MLP width (0: none), query heads, key/value heads, vocabulary, layers that attend; mixers have heads of
# 64 and 128 states, and are twice as wide as the stream
STATE_SHAPES: dict[str, tuple[int, int, int, int, int, int, tuple[int, ...]]] = {
    "mamba-100m": (768, 24, 0, 0, 0, 32000, ()),
    "hybrid-100m": (768, 12, 2048, 12, 4, 32000, (2, 5, 8)),
}


def folder(name: str) -> Path:
    """The checkpoint of ``shape:NAME`` in bfloat16, made if it is not in the user's cache yet.

    Raises:
        ConfigError: there is no such shape.
    """
    short = name.removeprefix(PREFIX)
    known = [*SHAPES, *FAMILY_SHAPES, *STATE_SHAPES]
    if short not in known:
        raise ConfigError(f"unknown shape '{short}': {nearest(short, known)}")

    def make(place: Path) -> None:
        write = write_random_states if short in STATE_SHAPES else write_random_model
        write(short, place, "bfloat16")

    return folder_made_once(f"shapes/{short}", make)


def write_random_model(name: str, folder: Path, dtype: str, *, positions: int = 4096) -> int:
    """A checkpoint of that shape with random weights and the bundled tokenizer; returns its parameter count.

    Args:
        name: one of ``SHAPES`` or ``FAMILY_SHAPES``.
        folder: where to; must exist.
        dtype: "float32" or "bfloat16".
        positions: longest sequence.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if name in SHAPES:
        width, layers, mlp, heads, kv_heads, vocabulary = SHAPES[name]
        kind, options = (
            "llama",
            {
                "hidden_size": width,
                "intermediate_size": mlp,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": 64,
            },
        )
    else:
        (kind, options), vocabulary = FAMILY_SHAPES[name], _FAMILY_VOCABULARY
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=getattr(torch, dtype),
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(zoo.path("base")).save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def write_random_states(name: str, folder: Path, dtype: str) -> int:
    """A checkpoint of one of ``STATE_SHAPES`` with random weights and the bundled tokenizer; returns its parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BambaConfig, Mamba2Config

    width, layers, mlp, heads, kv_heads, vocabulary, attending = STATE_SHAPES[name]
    torch.manual_seed(0)
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": getattr(torch, dtype),
    }
    config: Any = Mamba2Config(**shared, num_heads=2 * width // 64, head_dim=64, state_size=128, n_groups=1)
    if attending:
        config = BambaConfig(
            **shared,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            attn_layer_indices=list(attending),
            mamba_n_heads=2 * width // 64,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
        )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(zoo.path("base")).save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())
