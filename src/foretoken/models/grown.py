"""``grown:NAME:100m``: the very function of a small model at the cost of a larger one.

What a small model's drafts gain is known from its texts, what they cost is not: its steps are bound by other things
than a large model's. A grown model has the texts of the one and the steps of the other. It is made by growth that
preserves the function, after Net2Net (Chen et al., 2016):

* Width. The residual stream holds c copies of the original's. A matrix computes every output c times, and reads the
  copies in shares that sum to one; so do the heads, whose number grows, and whose size stays. The root mean square of
  a vector is that of its copies, so norms are copied. The shares are powers of two (c = 3: 1/2, 1/4, 1/4), hence no
  weight is rounded, in any dtype. An embedding that is also the head cannot carry shares: the final norm does.
* Depth. New layers are copies of the layer before them whose output matrices are zero. They are spread evenly, so that
  a share of the depth stays about the same share of the computation.

The grown weights are dense matrices like any others: reading and multiplying them costs what it costs in a model that
was trained at this size. They lie in the user's cache folder, made once in seconds, and can be deleted at any time.

Letters: O outputs, I inputs of a matrix; c copies.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken import zoo
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.files import folder_made_once
from foretoken.models.fingerprint import fingerprint

PREFIX = "grown:"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_WIDTH_OF_A_LAYER = 64  # columns of the residual stream for each layer that models of common shapes have
_MOST_COPIES = 16
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mb])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9}

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")  # whatever a layer adds to the stream goes through these
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_KNOWN = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight"
    r"|mlp\.(gate|up|down)_proj\.(weight|bias)|(input|post_attention)_layernorm\.weight)"
    r"|model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight"
)

Read = Callable[[str], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a grown model was grown from.

    Attributes:
        folder: of the original.
        width, layers: of the original.
        grown_layers: of the grown model.
    """

    folder: Path
    width: int
    layers: int
    grown_layers: int

    def depth(self, depth: int) -> int:
        """The depth of the grown model at which the first copy in the stream is the original's at ``depth``."""
        return sum(layer * self.layers // self.grown_layers < depth for layer in range(self.grown_layers))


@dataclass(frozen=True, slots=True)
class Growth:
    """How a model grows.

    Attributes:
        copies: of the residual stream.
        layers: of the grown model.
    """

    copies: int
    layers: int


def folder(name: str, read: Read) -> Path:
    """The checkpoint of a grown model, made if it is not in the cache yet.

    Args:
        name: ``grown:NAME:SIZE``; NAME is a model of the zoo (with or without ``zoo:``) or a local folder, SIZE is
            about how many parameters: ``100m``, ``1.5b``.
        read: loads a checkpoint in its own dtype: its folder to the model and the tokenizer.
    Raises:
        ConfigError: the name is not of this form, or the size is less than the model's.
        ModelError: the original cannot be loaded.
        UnsupportedArchitecture: it is of a family whose growth is not known to preserve the function.
    """
    original, size = _parse(name)
    mark = fingerprint(original)

    def write(place: Path) -> None:
        model, tokenizer = read(str(original))
        config, weights = grow(model, growth_for(model, size, name))
        config.save_pretrained(place)
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
        model.generation_config.save_pretrained(place)
        tokenizer.save_pretrained(place)

    return folder_made_once(f"grown/{original.name}-{size / 1e6:g}m-{mark[:16]}", write)


def origin_of(name: str, config: Any) -> Origin | None:
    """What the model of this name was grown from; None: its name is no grown one.

    Args:
        config: of the grown model.
    """
    if not name.startswith(PREFIX):
        return None
    original, _ = _parse(name)
    theirs = json.loads((original / "config.json").read_text(encoding="utf-8"))
    return Origin(original, theirs["hidden_size"], theirs["num_hidden_layers"], config.num_hidden_layers)


def _parse(name: str) -> tuple[Path, float]:
    original, _, written = name.removeprefix(PREFIX).rpartition(":")
    size = _SIZE.fullmatch(written)
    if not original or size is None:
        raise ConfigError(f"model '{name}': write grown:NAME:SIZE, as grown:base:100m or grown:FOLDER:1.5b")
    short = original.removeprefix(zoo.PREFIX)
    if short in zoo.MODELS or original.startswith(zoo.PREFIX):
        place = zoo.path(short)
    else:
        place = Path(original).expanduser()
    if not (place / "config.json").is_file():
        raise ConfigError(f"model '{name}': '{original}' is no model of the zoo and no folder with a checkpoint in it")
    return place, float(size[1]) * _UNITS[size[2].lower()]


def _check_family(model: Any, name: str) -> None:
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedArchitecture(
            f"model '{name}': models of type '{kind}' cannot be grown, only those of {', '.join(FAMILIES)}"
        )
    for part, _ in model.named_parameters():
        if not _KNOWN.fullmatch(part):
            raise UnsupportedArchitecture(f"model '{name}': it cannot be grown, the part '{part}' is unknown")


def growth_for(model: Any, size: float, name: str) -> Growth:
    """The growth whose parameters are nearly ``size``; of these, the one whose shape is nearest to common ones.

    Raises:
        ConfigError: the size is hardly more than the model's own.
        UnsupportedArchitecture: see :func:`folder`.
    """
    _check_family(model, name)
    parts = dict(model.named_parameters())
    matrices = sum(weight.numel() for part, weight in parts.items() if _LAYER.fullmatch(part) and weight.ndim == 2)
    tables = sum(weight.numel() for part, weight in parts.items() if not _LAYER.fullmatch(part))
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    growths = []
    for copies in range(1, _MOST_COPIES + 1):
        deep = round((size - tables * copies) / (matrices / layers * copies**2))
        if deep >= layers and (copies, deep) != (1, layers):
            growths.append(Growth(copies, deep))
    if not growths:
        own = sum(weight.numel() for weight in parts.values()) / 1e6
        raise ConfigError(f"model '{name}': the original has {own:.1f} M parameters; name a size beyond that")
    return min(growths, key=lambda each: abs(math.log(width * each.copies / each.layers / _WIDTH_OF_A_LAYER)))


def grow(model: Any, growth: Growth) -> tuple[Any, dict[str, Tensor]]:
    """The configuration and the weights of the grown model, of the same dtype; the given one is not touched.

    Args:
        model: a causal model of one of ``FAMILIES``.
    """
    config, copies = copy.deepcopy(model.config), growth.copies
    origins = [layer * config.num_hidden_layers // growth.layers for layer in range(growth.layers)]
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[origin] for origin in origins]
    config.num_hidden_layers = growth.layers
    for widened in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, widened, getattr(config, widened) * copies)
    given = model.state_dict()
    weights = {}
    for layer, origin in enumerate(origins):
        added = layer > 0 and origins[layer - 1] == origin
        for part, weight in given.items():
            found = _LAYER.fullmatch(part)
            if found and int(found[1]) == origin:
                silent = added and found[2].startswith(_OUTPUTS)
                wide = _wide(found[2], weight, copies)
                weights[f"model.layers.{layer}.{found[2]}"] = torch.zeros_like(wide) if silent else wide
    weights["model.embed_tokens.weight"] = given["model.embed_tokens.weight"].repeat(1, copies)
    final_norm = given["model.norm.weight"]
    weights["model.norm.weight"] = final_norm.repeat(copies) * _shares(final_norm, copies)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = given["lm_head.weight"].repeat(1, copies)
    return config, weights


def _wide(part: str, weight: Tensor, copies: int) -> Tensor:
    """A layer's parameter, widened."""
    if part in _HEAD_NORMS:  # heads keep their size
        return weight.clone()
    if weight.ndim == 1:  # norms and biases
        return weight.repeat(copies)
    return weight.repeat(copies, copies) * _shares(weight[0], copies)


def _shares(weight_I: Tensor, copies: int) -> Tensor:
    """Which share of its input a matrix reads from each copy, [c I]: powers of two that sum to one."""
    powers = [0.5**place for place in range(1, copies)] + [0.5 ** (copies - 1)]
    return torch.tensor(powers, dtype=weight_I.dtype).repeat_interleave(len(weight_I))
