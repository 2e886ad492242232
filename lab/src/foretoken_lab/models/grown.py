"""``grown:NAME:100m``: the very function of a small model at the cost of a larger one.

A small model's texts show the gain of its drafts, but not their cost: other things bound its steps than those of a
large model. A grown model has the texts of the one and the steps of the other. It is made by growth that
preserves the function, after Net2Net (Chen et al., 2016):

* Width. The residual stream holds c copies of the original's. A matrix computes every output c times, and reads the
  copies in shares that sum to one; likewise the heads: their number grows, their size stays. Mean and root mean
  square of a vector are those of its copies, so norms are copied. The shares are powers of two (c = 3: 1/2, 1/4, 1/4),
  hence no weight is rounded, in any dtype. An embedding that is also the head cannot carry shares: the final norm does.
* A final norm of gain 1 + w (Gemma, Nemotron) cannot carry shares without rounding w. There the first copies have the
  gain in full, and the others w = -1, which is none. Gemma scales its embedding by the root of the width, hence by
  sqrt(c) more: the embedding is divided by that, which is exact for c = 4 and 16 only, and so its head; sqrt(c) copies
  of the final norm have the gain.
* Experts grow each for itself, and their number stays; a router reads shares, and its outputs stay the same.
* Depth. New layers are copies of the layer before them, with zero output matrices. They are spread evenly, so that
  a share of the depth stays about the same share of the computation.
* Mixers of states grow as attentions do: heads and groups by copies, heads and states of the same size. Their in
  projection and their convolution are copied kind by kind (z, x, B, C, dt); so are other matrices that hold several
  kinds side by side (queries, keys and values; gates and gated factors).

The axes of a parameter that grow are read off a wider model of the same class, without memory for its weights.

The grown weights are dense matrices like any others: reading and multiplying them costs the same as in a model
trained at this size. They lie in the user's cache folder, made once in seconds, and can be deleted at any time.

Letters: O outputs, I inputs of a matrix; c copies; of a mixer N states, P width of a head, H heads, G groups.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from foretoken import zoo
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.files import home_expanded
from foretoken.models.checkpoint_files import quiet
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_as_is
from foretoken.models.made import MadeModels
from foretoken_lab.models.grown_families import FAMILIES, REASONS, Family
from foretoken_lab.models.made_once import folder_made_once
from foretoken_lab.models.origin import Origin, before_head, shares

PREFIX = "grown:"

_WIDTH_OF_A_LAYER = 64  # columns of the residual stream for each layer that models of common shapes have
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mb])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9}

_PER_LAYER = ("layer_types", "layers_block_type", "no_rope_layers")  # lists in a configuration

_BYTES = 2  # of a weight, at least


@dataclass(frozen=True, slots=True)
class Growth:
    """How a model grows.

    Attributes:
        copies: of the residual stream.
        layers: of the grown model.
    """

    copies: int
    layers: int


def folder(name: str) -> Path:
    """The checkpoint of a grown model, made if it is not in the cache yet.

    Args:
        name: ``grown:NAME:SIZE``; NAME is a model of the zoo (with or without ``zoo:``) or a local folder, SIZE is
            about how many parameters: ``100m``, ``1.5b``.
    Raises:
        ConfigError: the name is not of this form, or the size is less than the model's.
        ModelError: the original cannot be loaded.
        UnsupportedArchitecture: growth is not known to preserve the function of its family.
    """
    original, size = _parse(name)
    mark = fingerprint(original)

    def write(place: Path) -> None:
        found = load_as_is(original, device="cpu")
        larger = grow(found.model, growth_for(found.model, size, name))
        with quiet():
            larger.save_pretrained(place)
        found.tokenizer.save_pretrained(place)

    return folder_made_once(f"grown/{original.name}-{size / 1e6:g}m-{mark[:16]}", write)


def origin_of(name: str, config: Any) -> Origin | None:
    """The original of the model of this name; None: it is not the name of a grown model.

    Args:
        config: of the grown model.
    """
    if not name.startswith(PREFIX):
        return None
    original, _ = _parse(name)
    theirs = AutoConfig.from_pretrained(original)
    width, layers, family = theirs.hidden_size, theirs.num_hidden_layers, FAMILIES[theirs.model_type]
    copies = config.hidden_size // width
    shared = copies == 1 or not family.offset
    return Origin(original, width, layers, copies, config.num_hidden_layers, shared)


def _parse(name: str) -> tuple[Path, float]:
    original, _, written = name.removeprefix(PREFIX).rpartition(":")
    size = _SIZE.fullmatch(written)
    if not original or size is None:
        raise ConfigError(f"model '{name}': write grown:NAME:SIZE, as grown:base:100m or grown:FOLDER:1.5b")
    short = original.removeprefix(zoo.PREFIX)
    if short in zoo.MODELS or original.startswith(zoo.PREFIX):
        place = zoo.path(short)
    else:
        place = home_expanded(original)
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
        reason = f" ({REASONS[kind]})" if kind in REASONS else ""
        raise UnsupportedArchitecture(
            f"model '{name}': models of type '{kind}' cannot be grown{reason}, only those of {', '.join(FAMILIES)}"
        )
    family, parts = FAMILIES[kind], model.state_dict()
    for part in parts:
        if not family.knows(part):
            raise UnsupportedArchitecture(f"model '{name}': it cannot be grown, the part '{part}' is unknown")
    if f"{family.body}.{family.final_norm}.weight" not in parts:  # as in OPT with norms after its sums
        raise UnsupportedArchitecture(f"model '{name}': it cannot be grown, no norm before its head can carry shares")


def growth_for(model: Any, size: float, name: str) -> Growth:
    """The growth to nearly ``size`` parameters; of several, the one with the most common shape.

    Raises:
        ConfigError: the size is hardly more than the model's own.
        UnsupportedArchitecture: see :func:`folder`.
    """
    _check_family(model, name)
    family, parts = FAMILIES[model.config.model_type], dict(model.named_parameters())
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    wider = _without_weights(model, Growth(2, layers)).state_dict()
    sides = {part: sum(_growing(part, parts[part], wider, 2, name)) for part in parts}
    matrices = [part for part in parts if family.layer_of(part) and (parts[part].ndim == 2 or sides[part] == 2)]
    growths = []
    for copies in family.counts():
        sizes = {part: weight.numel() * copies ** sides[part] for part, weight in parts.items()}
        tables = sum(count for part, count in sizes.items() if family.layer_of(part) is None)
        stack = sum(sizes[part] for part in matrices)
        deep = round((size - tables) / (stack / layers))
        if deep >= layers and (copies, deep) != (1, layers):
            growths.append(Growth(copies, deep))
    if not growths:
        own = sum(weight.numel() for weight in parts.values()) / 1e6
        raise ConfigError(f"model '{name}': the original has {own:.1f} M parameters; name a size beyond that")
    return min(growths, key=lambda each: abs(math.log(width * each.copies / each.layers / _WIDTH_OF_A_LAYER)))


def _growing(part: str, weight: Tensor, wider: Mapping[str, Tensor], copies: int, name: str = "it") -> tuple[bool, ...]:
    """Which sides of a parameter have so many times the length in a wider model.

    Raises:
        UnsupportedArchitecture: one has neither that length nor its own.
    """
    theirs = wider[part].shape if part in wider else ()
    if len(theirs) != weight.ndim or any(b not in (a, a * copies) for a, b in zip(weight.shape, theirs, strict=True)):
        raise UnsupportedArchitecture(
            f"model '{name}': it cannot be grown, its part '{part}' of {tuple(weight.shape)} would have to be "
            f"{tuple(theirs)} where the stream is {copies} times as wide"
        )
    return tuple(b > a for a, b in zip(weight.shape, theirs, strict=True))


def grow(model: Any, growth: Growth) -> Any:
    """The grown model, of the same class and dtype; the given one is not touched.

    Args:
        model: a causal model of one of ``FAMILIES``.
    Raises:
        UnsupportedArchitecture: a part of it cannot have so many times the width.
    """
    family, copies, given = FAMILIES[model.config.model_type], growth.copies, model.state_dict()
    origins = _origins(model.config.num_hidden_layers, growth.layers)
    grown = _without_weights(model, growth)
    wider, weights = grown.state_dict(), {}
    pieces = _pieces(family, model.config, given)
    for part, place in wider.items():
        layer = family.layer_of(part)
        source = part if layer is None else part.replace(f".{layer[0]}.", f".{origins[layer[0]]}.", 1)
        weight = given[source]
        grows = _growing(part, weight, wider, copies)
        if layer is not None:
            added = layer[0] > 0 and origins[layer[0] - 1] == origins[layer[0]]
            rows = next((each for name, each in pieces.items() if source.startswith(name)), ())
            wide = _wide(weight, grows, copies, family.input_axis(layer[1]), rows)
            weights[part] = torch.zeros_like(wide) if added and layer[1].startswith(family.outputs) else wide
        elif family.norms_last(part):
            weights[part] = _final_norm(part, weight, copies, family)
        else:  # tables that begin the stream, and the head: copies, which may have to undo a scale
            wide = weight.repeat(*[copies if each else 1 for each in grows])
            weights[part] = wide / math.isqrt(copies) if family.scaled and place.ndim == 2 else wide
    grown.load_state_dict(weights, assign=True)
    grown.tie_weights()
    grown.generation_config = copy.deepcopy(model.generation_config)
    return grown.eval()


def _origins(layers: int, grown_layers: int) -> list[int]:
    """Of every grown layer, the one that it is a copy of."""
    return [layer * layers // grown_layers for layer in range(grown_layers)]


def _without_weights(model: Any, growth: Growth) -> Any:
    """The grown model without memory."""
    config, layers = copy.deepcopy(model.config), model.config.num_hidden_layers
    origins = _origins(layers, growth.layers)
    if getattr(config, "attn_layer_indices", None) is not None:
        attending = set(config.attn_layer_indices)
        config.attn_layer_indices = [layer for layer, origin in enumerate(origins) if origin in attending]
    for listed in _PER_LAYER:
        if vars(config).get(listed) is not None:  # else it is none, or follows from other fields
            setattr(config, listed, [getattr(config, listed)[origin] for origin in origins])
    if getattr(config, "first_k_dense_replace", None) is not None:
        config.first_k_dense_replace = sum(origin < config.first_k_dense_replace for origin in origins)
    if getattr(config, "decoder_sparse_step", None) is not None:
        step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
        dense |= {layer for layer in range(layers) if (layer + 1) % step}
        config.decoder_sparse_step = 1
        config.mlp_only_layers = [layer for layer, origin in enumerate(origins) if origin in dense]
    config.num_hidden_layers = growth.layers
    for each in FAMILIES[config.model_type].widened:
        if getattr(config, each, None) is not None:
            setattr(config, each, getattr(config, each) * growth.copies)
    with torch.device("meta"):
        return type(model)(config)


def _pieces(family: Family, config: Any, given: Mapping[str, Tensor]) -> dict[str, Sequence[int]]:
    """Of modules that hold several matrices side by side: the beginning of their parts' names -> the proportions.

    In projection and convolution of a mixer hold z, x, B, C and dt.
    """
    found: dict[str, Sequence[int]] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"{family.body}.{family.layers}.{layer}."
        for module, proportions in family.packed.items():
            if f"{prefix}{module}.weight" in given or prefix + module in given:
                found[prefix + module] = proportions or _heads(config)
        mixer = f"{prefix}{family.mixer}."
        if f"{mixer}A_log" in given:
            heads, inner = len(given[f"{mixer}A_log"]), given[f"{mixer}out_proj.weight"].shape[1]
            shared = (len(given[f"{mixer}conv1d.weight"]) - inner) // 2  # G N
            found[f"{mixer}in_proj."] = (inner, inner, shared, shared, heads)
            found[f"{mixer}conv1d."] = (inner, shared, shared)
    return found


def _heads(config: Any) -> tuple[int, ...]:
    """Of queries, keys and values."""
    return (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)


def _wide(weight: Tensor, grows: Sequence[bool], copies: int, reads: int | None, proportions: Sequence[int]) -> Tensor:
    """A layer's parameter, widened.

    Args:
        grows: of every side, whether it does.
        reads: the side of a matrix that is read in shares, counted from the last.
        proportions: of the outputs that it computes side by side; empty: they are of one kind.
    """
    for axis, growing in enumerate(grows):
        if not growing:
            continue
        if reads is not None and weight.ndim >= 2 and axis == weight.ndim + reads:
            weight = torch.cat([weight * share for share in shares(copies)], axis)
        else:
            whole = weight.shape[axis]
            rows = [whole * each // sum(proportions) for each in proportions] or whole
            weight = torch.cat([each for piece in weight.split(rows, axis) for each in [piece] * copies], axis)
    return weight.clone()


def _final_norm(part: str, gain_D: Tensor, copies: int, family: Family) -> Tensor:
    """Gain or bias of the norm before the head, which reads all copies alike."""
    if not family.offset:
        return before_head(gain_D, copies)
    kept = math.isqrt(copies) if family.scaled else 1
    silent_D = torch.full_like(gain_D, -1.0 if part.endswith("weight") else 0.0)
    return torch.cat([gain_D] * kept + [silent_D] * (copies - kept))


MADE = MadeModels(folder, origin_of)
