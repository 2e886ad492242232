"""What a checkpoint's configs say about a model: the kinds of its layers, its longest sequence, where texts end."""

import logging
from typing import Any

from foretoken.core.errors import ConfigError, ModelError, UnsupportedArchitecture
from foretoken.forward.ssm.layout import REMEDY

log = logging.getLogger(__name__)

# Layer types (config.layer_types) that pass their mask as keywords. Others build a mask that we cannot inspect. One in
# chunks is causal within the first of them (8,192 tokens of Llama 4), and the probe refuses more.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_SILENT_LAYERS = frozenset({"mlp", "moe"})  # they keep nothing of their rows


def check_layers(text: Any, name: str, kind: str, mixing: set[int]) -> set[int]:
    """Refuse a layer of a type that is not known, unless its mixer was read; the layers that keep nothing."""
    if text.num_hidden_layers < 1:
        raise UnsupportedArchitecture(f"model '{name}' ({kind}) has {text.num_hidden_layers} layers")
    types = list(getattr(text, "layer_types", None) or ())
    for layer, what in enumerate(types):
        if what not in _KNOWN_LAYERS | _SILENT_LAYERS and layer not in mixing:
            raise UnsupportedArchitecture(
                f"model '{name}' ({kind}) is not supported: layer {layer} is of type '{what}'; {REMEDY}"
            )
    return {layer for layer, what in enumerate(types) if what in _SILENT_LAYERS}


def max_length_of(text: Any, name: str, wanted: int | None) -> int:
    """Return the longest sequence to serve.

    Args:
        text: the config of the text model.
        wanted: the user's limit; None: the model's.
    Raises:
        ConfigError: the model cannot serve as many positions.
        ModelError: its config allows too few.
    """
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if wanted is not None and wanted < 2:
        raise ConfigError(f"max_model_len={wanted} is too short: a prompt and one token need at least 2")
    switch = _rotary_switch(text)
    if switch is not None and (limit is None or switch < limit):
        if wanted is not None and wanted > switch:
            raise ConfigError(
                f"max_model_len={wanted} is not possible with model '{name}': beyond {switch} positions its rotary "
                "embedding (longrope) turns to other frequencies, for every request and for keys already cached"
            )
        limit = switch
    if limit is not None and limit < 2:
        raise ModelError(f"model '{name}': its config allows {limit} positions: a prompt and one token need at least 2")
    if wanted is None:
        return int(limit or 4096)
    if limit and wanted > limit:
        raise ConfigError(f"max_model_len={wanted} exceeds the {limit} positions of model '{name}'")
    return wanted


def _rotary_switch(text: Any) -> int | None:
    """Positions after which the library picks other rotary frequencies for the whole batch; None if it never does."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # one table, or one for each layer type
    switches = [
        each.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for each in kinds
        if each.get("rope_type") == "longrope"
    ]
    return min((int(switch) for switch in switches if switch), default=None)


def end_ids_of(model: Any, tokenizer: Any, name: str, vocab_size: int) -> frozenset[int]:
    """Return the tokens that end a generation: those of the generation config, else of the model config, and those that
    the tokenizer names, as vLLM and mlx-lm do: a fine-tuned chat model often names its end of a turn only there.
    """
    stated: frozenset[int] = frozenset()
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            stated = _stated_ends(found, name, vocab_size)
            break
    named = {getattr(tokenizer, "eos_token_id", None), *getattr(tokenizer, "turn_end_ids", ())} - stated
    more = sorted(each for each in named if isinstance(each, int) and 0 <= each < vocab_size)
    if more:
        log.warning(
            "model '%s': texts end at %s too, which its tokenizer names and its config does not; ignore_eos or stop "
            "tokens of your own decide otherwise",
            name,
            ", ".join(f"{tokenizer.convert_ids_to_tokens(each)!r} ({each})" for each in more),
        )
    return stated.union(more)


def _stated_ends(found: Any, name: str, vocab_size: int) -> frozenset[int]:
    """Return the tokens among ``eos_token_id`` of a config that the model has."""
    ids = found if isinstance(found, (list, tuple)) else [found]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ModelError(
            f"model '{name}': eos_token_id={found!r:.60} must be a token or a list of tokens: correct it in "
            "generation_config.json, or in config.json"
        )
    known = frozenset(each for each in ids if 0 <= each < vocab_size)
    if beyond := sorted(set(ids) - known):
        rest = f"texts end at {sorted(known)}" if known else "it ends no text"
        log.warning(
            "model '%s': eos_token_id=%s is beyond its vocabulary of %d: %s",
            name,
            ", ".join(map(str, beyond)),
            vocab_size,
            rest,
        )
    return known
