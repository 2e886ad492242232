"""The layouts of published drafters as data, and the one that a folder has.

Names of tensors decide, keys of ``config.json`` distinguish what names leave open; the first fitting row counts.
A row with ``refused`` is known and not run: its folder is refused by name, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from foretoken.core.errors import ModelError

EAGLE, DFLASH, PARD, DRAFT_MODEL = "eagle", "dflash", "pard", "draft_model"  # methods
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout.

    Attributes:
        name: the maker and the kind of network, for messages and tables.
        method: name of the method that runs it; empty: the config's ``speculators_model_type``.
        keys: keys of the config, with dots for objects within objects, and their values; no values: it is there.
        tensors: patterns; each one occurs in the name of a tensor.
        refused: why it is not run; empty: it is.
        renamed: beginnings of names and what the network calls them.
        ids: key of the tapped layers, or several with bars between them.
        counting: whether an id k means the input of layer k (the stream after k layers), its output (after k + 1), or
            either: the output where the first id is 1, as vLLM and SGLang read these.
    """

    name: str
    method: str = ""
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    refused: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    ids: str = ""
    counting: Literal["inputs", "outputs", "either"] = "inputs"

    def fits(self, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether a folder with this config and these tensors has the layout."""
        for key, values in self.keys.items():
            found = value_of(config, key)
            if found is None or (values and found not in values):
                return False
        return all(any(re.search(pattern, name) for name in names) for pattern in self.tensors)

    def depths(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Numbers of layers after which the target's stream is read."""
        found = tuple(ids)
        more = self.counting == "outputs" or (self.counting == "either" and found[:1] == (1,))
        return tuple(each + 1 for each in found) if more else found

    def own_names(self, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return tensors by the network's names, without those that follow from the config."""
        found = {}
        for name, value in tensors.items():
            if not IGNORABLE.search(name):
                for old, new in self.renamed:
                    name = new + name.removeprefix(old) if name.startswith(old) else name
                found[name] = value
        return found


_ELSEWHERE = "use an EAGLE-3, DFlash or PARD drafter of the target, or a draft model"
_OLD = f"only targets of 2024 and before have one: {_ELSEWHERE}"
_NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
_FUSED = r"(^|\.)(midlayer|layers\.0)\.hidden_norm\.weight$"  # the first block of EAGLE-3 reads token and feature
_MIDLAYER = (("model.", ""), ("midlayer.", "layers.0."))

LAYOUTS = (
    Layout(
        name="quantised head",
        keys={"quantization_config": ()},
        tensors=(_FUSED,),
        refused="its weights are quantised: name the folder of the unquantised head",
    ),
    Layout(name="Medusa", keys={"medusa_num_heads": ()}, refused=_OLD),
    Layout(name="Medusa", tensors=(r"^(medusa_head\.)?\d+\.\d+\.linear\.weight$",), refused=_OLD),
    Layout(name="Hydra", keys={"hydra_num_heads": ()}, refused=_OLD),
    Layout(name="MLP speculator", keys={"model_type": ("mlp_speculator",)}, refused=_OLD),
    Layout(name="MLP speculator", tensors=(r"(^|\.)proj\.0\.weight$", r"(^|\.)emb\.0\.weight$"), refused=_OLD),
    Layout(
        name="EAGLE-4",
        keys={"efficient_lm_head_config": ()},
        refused=f"its low-rank LM head and latent experts are not computed here: {_ELSEWHERE}",
    ),
    Layout(
        name="P-EAGLE",
        method=EAGLE,
        tensors=(r"(^|\.)mask_hidden$", _FUSED),
        renamed=_MIDLAYER,
        ids=_NESTED,
        counting="either",
    ),
    Layout(
        name="EAGLE-3 with latent attention",
        tensors=(r"kv_a_proj_with_mqa", _FUSED),
        refused=f"its attention over a compressed state is not computed here: {_ELSEWHERE}",
    ),
    Layout(
        name="Gemma 4 assistant",
        keys={"model_type": ("gemma4_assistant", "gemma4_unified_assistant")},
        refused=f"its layers read keys of the target's own cache, which is not done here: {_ELSEWHERE}",
    ),
    Layout(
        name="DFlash2",
        tensors=(r"(^|\.)candidate_selector\.",),
        refused=f"its convolutions and its selector are not computed here: {_ELSEWHERE}",
    ),
    Layout(name="Domino", tensors=(r"(^|\.)prefix_gru\.",), refused=f"its GRU is not computed here: {_ELSEWHERE}"),
    Layout(
        name="DFlash and DSpark of speculators",
        method=DFLASH,
        keys={"speculators_model_type": ("dflash", "dspark")},
        ids="aux_hidden_state_layer_ids",
    ),
    Layout(
        name="DFlash and DSpark of z-lab, DeepSpec and SpecForge",
        method=DFLASH,
        tensors=(r"^(model\.)?fc\.weight$", r"^(model\.)?hidden_norm\.weight$", r"layers\.0\.input_layernorm"),
        renamed=(("model.", ""), ("confidence_proj.", "confidence_head.proj."), ("markov_w", "markov_head.markov_w")),
        ids="target_layer_ids|dflash_config.target_layer_ids",
        counting="outputs",
    ),
    Layout(
        name="MTP of speculators",
        keys={"speculators_model_type": ("mtp",)},
        refused="the layer is read from the target's own folder: use method='mtp' with a checkpoint that has one",
    ),
    Layout(
        name="EAGLE-3 of speculators",
        method=EAGLE,
        keys={"speculators_model_type": ("eagle3",)},
        renamed=(("midlayer.", "layers.0."),),
        ids="eagle_aux_hidden_state_layer_ids",
    ),
    Layout(
        name="EAGLE-1/2 of speculators",
        method=EAGLE,
        keys={"speculators_model_type": ("eagle",)},
        renamed=(("transformer.", "layers.0."), ("fusion_fc.", "fc.")),
    ),
    Layout(
        name="EAGLE-3 of DeepSpec",
        method=EAGLE,
        keys={"target_layer_ids": ()},
        tensors=(_FUSED,),
        renamed=_MIDLAYER,
        ids="target_layer_ids",
        counting="outputs",
    ),
    Layout(
        name="EAGLE-3 of SpecForge",
        method=EAGLE,
        keys={"architectures": (["LlamaForCausalLMEagle3"],)},
        tensors=(_FUSED,),
        renamed=_MIDLAYER,
        ids=_NESTED,
        counting="either",
    ),
    Layout(
        name="EAGLE-3 of NeMo Automodel",
        method=EAGLE,
        tensors=(r"^model\.(midlayer|layers\.0)\.hidden_norm\.weight$",),
        renamed=_MIDLAYER,
        ids=_NESTED,
        counting="either",
    ),
    Layout(
        name="EAGLE-3 of NVIDIA ModelOpt",
        method=EAGLE,
        keys={"eagle_config": ()},
        tensors=(_FUSED,),
        renamed=_MIDLAYER,
        ids=_NESTED,
        counting="either",
    ),
    Layout(name="EAGLE-3 of SafeAILab", method=EAGLE, tensors=(_FUSED,), renamed=_MIDLAYER, ids=_NESTED),
    Layout(
        name="EAGLE-1/2 of SafeAILab",
        method=EAGLE,
        tensors=(r"^fc\.weight$", r"^layers\.0\.self_attn\.q_proj\.weight$"),
    ),
    Layout(name="part of 'foretoken train'", keys={"speculators_model_type": ()}),
    Layout(name="PARD", method=PARD, keys={"model_type": (), "pard_token": ()}),
    Layout(name="causal language model", method=DRAFT_MODEL, keys={"model_type": ()}),
)
"""Most special first."""

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

IGNORABLE = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors that follow from the config."""


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key with dots for objects within objects; None where it is missing."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def stated(config: Mapping[str, Any], name: str, nested: str) -> Any:
    """Return the value of an option at the top or in an object of the config; None: neither has it.

    Raises:
        ValueError: they contradict each other.
    """
    top, inner = config.get(name), value_of(config, f"{nested}.{name}")
    if top is not None and inner is not None and top != inner:
        raise ValueError(f"{name}={top!r}, but {nested}.{name}={inner!r}")
    return top if inner is None else inner


def mask_token_of(config: Mapping[str, Any], nested: str) -> Any:
    """Return the token of mask rows, which has several names; None: there is none."""
    return next((value for name in MASK_KEYS if (value := stated(config, name, nested)) is not None), None)


def recognise(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Return the layout of a folder.

    Args:
        config: content of its ``config.json``.
        names: of its tensors.
    Raises:
        ModelError: it has none that is known, or one that is refused.
    """
    given = list(names)
    for layout in LAYOUTS:
        if layout.fits(config, given):
            if layout.refused:
                raise ModelError(f"{layout.name}: {layout.refused}")
            return layout
    shown = ", ".join(sorted(given)[:3])
    raise ModelError(f"no known drafter or language model: its tensors are {shown}, …; {_ELSEWHERE}")
