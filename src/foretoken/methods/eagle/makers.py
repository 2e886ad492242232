"""EAGLE heads of other makers in the form of the speculators format, which config.py and checkpoint.py read.

The rows of drafting/published/layouts.py say which names and keys a maker has; here they are applied. A
config's values are kept; a missing one has the maker's default; two places that contradict each other are an error.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from foretoken.drafting.published.blocks import WHERE, block_type
from foretoken.drafting.published.layouts import MASK_KEYS, Layout, mask_token_of, recognise, stated, value_of
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, EITHER, from_settings

_NESTED = "eagle_config"
_stated = partial(stated, nested=_NESTED)
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FIXED = {  # options of ModelOpt, with the values that EAGLE-3 has
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1, 0),
}


def in_our_form(settings: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return config and tensors in the speculators format, the tensors under the names of our network.

    Raises:
        ModelError: the layout is unknown, or known and refused.
        ValueError: the config contradicts itself, or does not say enough; the message names the field.
    """
    if not isinstance(settings, dict):
        raise ValueError("config.json is not an object")
    layout = recognise(settings, tensors)
    found = layout.own_names(tensors)
    settings = _with_mask(settings, found)
    if "speculators_model_type" in settings:
        return _with_read_depths(settings, found), found
    if "transformer_layer_config" in settings:
        raise ValueError("transformer_layer_config is there, but speculators_model_type is missing")
    ours = _from_flat(settings, found, layout)
    try:
        from_settings(ours)
    except ValueError as error:  # fields lie flat there
        raise ValueError(str(error).replace(WHERE, "")) from None
    return ours, found


def _from_flat(settings: dict[str, Any], found: dict[str, Tensor], layout: Layout) -> dict[str, Any]:
    """The config in the speculators format; tensors that it makes superfluous are taken out of ``found``."""
    block = {**settings, "model_type": block_type(found)}
    owner = {"verifier": {"name_or_path": f"an unnamed target ({layout.name})"}}
    ours = {"transformer_layer_config": block, "target_hidden_size": settings.get("target_hidden_size")}
    if "layers.0.hidden_norm.weight" not in found:  # EAGLE-1/2
        for name in ("embed_tokens.weight", "lm_head.weight"):  # copies of the target's tables
            found.pop(name, None)
        kind = {"speculators_model_type": EAGLE2, "speculators_config": {**owner, "algorithm": EAGLE2}}
        return {**ours, **kind, "fusion_bias": "fc.bias" in found}
    for name, allowed in _FIXED.items():
        value = _stated(settings, name)
        if value is not None and value not in allowed:
            raise ValueError(f"eagle_config.{name}={value!r}: known is {allowed[0]}")
    ids = value_of(settings, layout.ids)
    if ids is None:
        ids = _stated(settings, "eagle_aux_hidden_state_layer_ids")
    if ids is not None and (not isinstance(ids, list) or any(type(each) is not int for each in ids)):
        raise ValueError(f"{layout.ids}={ids!r}: a list of layers")
    flags = {name: bool(value) for name in _FLAGS if (value := _stated(settings, name)) is not None}
    if not flags.get("fc_norm"):  # elsewhere SpecForge means by norm_output that the LM head reads normed outputs
        flags["norm_output"] = False
    whole = len(found["embed_tokens.weight"]) if "embed_tokens.weight" in found else settings.get("vocab_size")
    scored = len(found["lm_head.weight"]) if "lm_head.weight" in found else None
    size = settings.get("draft_vocab_size") or scored or whole
    if size == whole:  # a map of all tokens says nothing
        for name in ("d2t", "t2d"):
            found.pop(name, None)
    return _with_read_depths(
        {
            **ours,
            **flags,
            "speculators_model_type": EAGLE3,
            "speculators_config": {**owner, "algorithm": EAGLE3},
            "draft_vocab_size": size,
            MASK_KEYS[0]: settings[MASK_KEYS[0]],
            "eagle_aux_hidden_state_layer_ids": None if ids is None else list(layout.depths(ids)),
            EITHER: layout.counting == "either",
        },
        found,
    )


def _with_mask(settings: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with P-EAGLE's mask token by its first name; without it where the weights have no mask state."""
    said = mask_token_of(settings, _NESTED)
    if "mask_hidden" in tensors and said is None:
        raise ValueError(f"there is a mask_hidden, but no {' or '.join(MASK_KEYS)}")
    return {**settings, MASK_KEYS[0]: said if "mask_hidden" in tensors else None}


def _with_read_depths(settings: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with as many depths as the fusion reads: a further one may follow, for the trainer's own use."""
    ids, block = settings.get("eagle_aux_hidden_state_layer_ids"), settings.get("transformer_layer_config")
    if settings.get("speculators_model_type") != EAGLE3 or not isinstance(block, dict):
        return settings
    if "fc.weight" not in tensors:
        alone = ids if isinstance(ids, list) and len(ids) == 1 else None
        return {**settings, "use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": alone}
    width = settings.get("target_hidden_size") or block.get("hidden_size")
    count, rest = divmod(tensors["fc.weight"].shape[-1], width) if type(width) is int and width > 0 else (3, 0)
    if rest:  # another width than the config says, which is refused by its shape
        return settings
    if not ids and count != 3:
        raise ValueError(f"fc.weight reads {count} states, but eagle_aux_hidden_state_layer_ids does not name them")
    return {**settings, "eagle_aux_hidden_state_layer_ids": ids[:count]} if ids and len(ids) == count + 1 else settings
