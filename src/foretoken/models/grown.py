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
* Mixers of states grow as attentions do: heads and groups by copies, heads and states of the same size. What their in
  projection and their convolution have of each kind (z, x, B, C, dt) is copied kind by kind.

The grown weights are dense matrices like any others: reading and multiplying them costs what it costs in a model that
was trained at this size. They lie in the user's cache folder, made once in seconds, and can be deleted at any time.

Letters: O outputs, I inputs of a matrix; c copies; of a mixer N states, P width of a head, H heads, G groups.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Mapping
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

_WIDTH_OF_A_LAYER = 64  # columns of the residual stream for each layer that models of common shapes have
_MOST_COPIES = 16
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mb])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9}

_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_MIXER = r"(in_proj|out_proj|conv1d)\.(weight|bias)|norm\.weight|dt_bias|A_log|D"


@dataclass(frozen=True, slots=True)
class _Family:
    """Models that grow alike.

    Attributes:
        body: what holds everything but the head.
        embedding, final_norm: of the body.
        parts: what a layer may have, a regular expression.
        outputs: whatever a layer adds to the stream goes through these.
        widened: of the configuration, what has a factor of c.
        mixer: of a layer, where it has one.
    """

    body: str = "model"
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    parts: str = (
        r"self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight"
        r"|mlp\.(gate|up|down)_proj\.(weight|bias)|(input|post_attention)_layernorm\.weight"
    )
    outputs: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    widened: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    mixer: str | None = None

    def knows(self, part: str) -> bool:
        """Whether it is known what becomes of a parameter."""
        layer = _LAYER.fullmatch(part)
        if layer is not None and part.startswith(self.body):
            return re.fullmatch(self.parts, layer[2]) is not None
        return part in (f"{self.body}.{self.embedding}", f"{self.body}.{self.final_norm}", "lm_head.weight")


_LLAMA = _Family()
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "bamba": _Family(
        final_norm="final_layernorm.weight",
        parts=rf"self_attn\.[qkvo]_proj\.(weight|bias)|mamba\.({_MIXER})"
        r"|feed_forward\.(gate|up|down)_proj\.(weight|bias)|(input|pre_ff)_layernorm\.weight",
        outputs=("self_attn.o_proj", "mamba.out_proj", "feed_forward.down_proj"),
        widened=(*_LLAMA.widened, "mamba_n_heads", "mamba_n_groups"),
        mixer="mamba",
    ),
    "mamba2": _Family(
        body="backbone",
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        parts=rf"norm\.weight|mixer\.({_MIXER})",
        outputs=("mixer.out_proj",),
        widened=("hidden_size", "num_heads", "n_groups"),
        mixer="mixer",
    ),
}
FAMILIES = tuple(_FAMILIES)

_BYTES = 2  # of a weight, at least

Read = Callable[[str], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a grown model was grown from.

    Attributes:
        folder: of the original.
        width, layers: of the original.
        copies: of the original's stream in that of the grown model.
        grown_layers: of the grown model.
    """

    folder: Path
    width: int
    layers: int
    copies: int
    grown_layers: int

    @property
    def first_share(self) -> float:
        """Of the first copy in what the final norm of the grown model gives, to the original's."""
        return 1.0 if self.copies == 1 else 0.5

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
    width, layers = theirs["hidden_size"], theirs["num_hidden_layers"]
    return Origin(original, width, layers, config.hidden_size // width, config.num_hidden_layers)


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
    parameters = float(size[1]) * _UNITS[size[2].lower()]
    needed, there = parameters * _BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:  # the system would end this process, or another one, while the weights are made
        raise ConfigError(
            f"model '{name:.60}': its weights would take {needed / 1e9:,.0f} GB, and this machine has "
            f"{there / 1e9:,.0f} GB of memory; name a smaller size"
        )
    return place, parameters


def _check_family(model: Any, name: str) -> None:
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedArchitecture(
            f"model '{name}': models of type '{kind}' cannot be grown, only those of {', '.join(FAMILIES)}"
        )
    for part, _ in model.named_parameters():
        if not _FAMILIES[kind].knows(part):
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
    family = _FAMILIES[config.model_type]
    origins = [layer * config.num_hidden_layers // growth.layers for layer in range(growth.layers)]
    if getattr(config, "attn_layer_indices", None) is not None:
        attending = set(config.attn_layer_indices)
        config.attn_layer_indices = [layer for layer, origin in enumerate(origins) if origin in attending]
    elif vars(config).get("layer_types") is not None:  # else it is none, or follows from other fields
        config.layer_types = [config.layer_types[origin] for origin in origins]
    config.num_hidden_layers = growth.layers
    for widened in family.widened:
        setattr(config, widened, getattr(config, widened) * copies)
    given = model.state_dict()
    weights = {}
    for layer, origin in enumerate(origins):
        added = layer > 0 and origins[layer - 1] == origin
        prefix = f"{family.body}.layers.{origin}."
        kinds = _kinds(given, f"{prefix}{family.mixer}.")
        for name in (each for each in given if each.startswith(prefix)):
            part = name.removeprefix(prefix)
            silent = added and part.startswith(family.outputs)
            wide = _wide(part, given[name], copies, kinds)
            weights[f"{family.body}.layers.{layer}.{part}"] = torch.zeros_like(wide) if silent else wide
    embedding, final_norm = f"{family.body}.{family.embedding}", f"{family.body}.{family.final_norm}"
    weights[embedding] = given[embedding].repeat(1, copies)
    weights[final_norm] = before_head(given[final_norm], copies)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = given["lm_head.weight"].repeat(1, copies)
    return config, weights


def _kinds(given: Mapping[str, Tensor], mixer: str) -> dict[str, list[int]]:
    """What the rows of a mixer's in projection and convolution are: z, x, B, C and dt; empty for another layer."""
    if f"{mixer}A_log" not in given:
        return {}
    heads, inner = len(given[f"{mixer}A_log"]), given[f"{mixer}out_proj.weight"].shape[1]
    shared = (len(given[f"{mixer}conv1d.weight"]) - inner) // 2  # G N
    return {"in_proj": [inner, inner, shared, shared, heads], "conv1d": [inner, shared, shared]}


def _wide(part: str, weight: Tensor, copies: int, kinds: Mapping[str, list[int]]) -> Tensor:
    """A layer's parameter, widened.

    Args:
        kinds: module of a mixer -> how many of its rows are of each kind.
    """
    if part in _HEAD_NORMS:  # heads keep their size
        return weight.clone()
    rows = next((each for name, each in kinds.items() if f".{name}." in part), [len(weight)])
    return torch.cat([widened(each, copies) for each in weight.split(rows)])


def widened(weight: Tensor, copies: int) -> Tensor:
    """A matrix that reads and writes so many copies of a stream; of another parameter, its copies."""
    if weight.ndim == 2:
        weight = weight.repeat(1, copies) * _shares(weight[0], copies)
    return weight.repeat(copies, *[1] * (weight.ndim - 1))


def before_head(gain_D: Tensor, copies: int) -> Tensor:
    """The gain of a norm before a grown model's head: it carries the shares that the head, copies alone, does not."""
    return gain_D.repeat(copies) * _shares(gain_D, copies)


def _shares(weight_I: Tensor, copies: int) -> Tensor:
    """Which share of its input a matrix reads from each copy, [c I]: powers of two that sum to one."""
    powers = [0.5**place for place in range(1, copies)] + [0.5 ** (copies - 1)]
    return torch.tensor(powers, dtype=weight_I.dtype).repeat_interleave(len(weight_I))
