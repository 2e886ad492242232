"""``shape:100m``: Llama shapes with random weights. Their texts mean nothing, their times are those of the shape.

``shape:mamba-100m`` is a Mamba-2, ``shape:hybrid-100m`` Mamba-2 and attention layers in the layout of Bamba;
``shape:gemma3-100m`` and its neighbours are of the families that they are named after, ``shape:moe-100m`` is a Mixtral
of which a row goes through as much as through ``shape:100m``. ``shape:1b`` and ``shape:3b`` are Llama 3.2's,
``shape:7b`` is Qwen 2.5's: they take 2.5, 6.4 and 15 GB of the user's cache, and are written piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken import zoo
from foretoken.core.errors import ConfigError, nearest
from foretoken.models.made import MadeModels
from foretoken_lab.models.made_once import folder_made_once

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PREFIX = "shape:"


class Shape(NamedTuple):
    """Sizes of a Llama.

    Attributes:
        tied: whether the head is the embedding.
    """

    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 64
    tied: bool = True


SHAPES = {
    "16m": Shape(384, 8, 1024, 6, 2, 8192),
    "100m": Shape(768, 12, 2048, 12, 4, 32000),
    "500m": Shape(1280, 24, 3840, 20, 4, 32000),
    "1b": Shape(2048, 16, 8192, 32, 8, 128256),
    "3b": Shape(3072, 28, 8192, 24, 8, 128256, head_dim=128),
    "7b": Shape(3584, 28, 18944, 28, 4, 152064, head_dim=128, tied=False),
    # draft models with large vocabularies: the head is most of the memory read for a draft token
    "draft32k": Shape(768, 4, 2048, 12, 4, 32000),
    "draft152k": Shape(1024, 4, 2816, 16, 4, 151936),
}
_SHARD = 2 << 30  # bytes

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
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    config = config_of(name, dtype, positions=positions)
    tensors = random_tensors(config, getattr(torch, dtype))
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(zoo.path("base")).save_pretrained(folder)
    return _save(tensors, folder)


def config_of(name: str, dtype: str, *, positions: int = 4096) -> Any:
    """The config, of transformers; arguments as for :func:`write_random_model`."""
    import torch
    from transformers import AutoConfig

    if name in SHAPES:
        shape = SHAPES[name]
        kind, vocabulary, tied = "llama", shape.vocabulary, shape.tied
        options = {
            "hidden_size": shape.width,
            "intermediate_size": shape.mlp,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
        }
    else:
        (kind, options), vocabulary, tied = FAMILY_SHAPES[name], _FAMILY_VOCABULARY, True
    return AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=getattr(torch, dtype),
        **options,
    )


def random_tensors(config: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the library draws for a config, module by module, so that one module's are in memory."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    tied = model.lm_head if config.tie_word_embeddings else None
    for path, module in model.named_modules():
        if module is tied or not any(True for _ in module.parameters(recurse=False)):
            continue
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            model._init_weights(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield f"{path}.{name}", parameter.detach().to(dtype)
        module.to("meta")


def _save(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> int:
    """Write tensors in files of about 2 GiB, with an index if there are several; returns the number of elements."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    count = size = 0

    def write() -> None:
        save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if sum(each.nbytes for each in held.values()) + tensor.nbytes > _SHARD and held:
            write()
        held[name] = tensor
        count, size = count + tensor.numel(), size + tensor.nbytes
    write()
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    if len(names) == 1:
        names = ["model.safetensors"]
    for index, name in enumerate(names):
        (folder / f"{index}.safetensors").rename(folder / name)
    if len(names) > 1:
        places = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        index_text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=1)
        (folder / "model.safetensors.index.json").write_text(index_text + "\n", encoding="utf-8")
    return count


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


MADE = MadeModels(folder)
