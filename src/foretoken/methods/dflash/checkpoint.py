"""Folders of DFlash and DSpark: their makers' keys and names, and the target that they belong to."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.description import spread_depths
from foretoken.drafting.published.blocks import WHERE, block_fields, block_settings, block_type, speculators_config
from foretoken.drafting.published.layouts import MASK_KEYS, Layout, mask_token_of, recognise, stated, value_of
from foretoken.drafting.published.vocabulary_maps import LM_HEAD, check_tables
from foretoken.methods.dflash.network import DFlashConfig, DFlashNetwork
from foretoken.models.language_model import LanguageModel

_NESTED = "dflash_config"
_stated = partial(stated, nested=_NESTED)
_DFLASH2 = {
    "conv_taps": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top": "selector_top_k",
}
_READ = "read from the tensors"  # key of sizes that the config need not state


class DFlash(DFlashNetwork):
    """The network of a folder; see :class:`foretoken.drafting.learned_part.LearnedPart`."""

    algorithm = "dflash"
    model_types = ("dflash", "dspark")
    title = "DFlash drafter"
    Config = DFlashConfig

    @classmethod
    def shape_for(cls, num_layers: int) -> dict[str, Any]:
        """Two layers, which read the target after its first, its middle and its last layer but one."""
        depths = tuple(sorted({1, max(1, num_layers // 2), max(1, num_layers - 1)}))
        shape = {"layers": 2, "rows": 5, "windows": (0, 6), "causal": (False, True), "depths": depths}
        return {**shape, "norm_heads": True}

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width, vocabulary or depth.

        Raises:
            MismatchError: names the differing field of ``config.json``.
        """
        super().check_shape(model)
        config, layers = self.config, model.num_layers
        if config.target_layers not in (0, layers):
            raise MismatchError(
                f"the {self.title}'s num_target_layers is {config.target_layers}, but '{model.name}' has {layers}"
            )
        if max(config.depths) > layers:
            raise MismatchError(f"the {self.title} reads depth {max(config.depths)}, but '{model.name}' has {layers}")
        check_tables(self, model)

    # ------------------------------------------------------------------ config.json

    @classmethod
    def _own_layout(cls, settings: Any, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        if not isinstance(settings, dict):
            raise ValueError("config.json is not an object")
        layout = recognise(settings, tensors)
        found = layout.own_names(tensors)
        if "fc.weight" not in found:
            raise ValueError("the tensor fc.weight is missing")
        names = set(found)
        own_head, size = found.get(LM_HEAD), _stated(settings, "draft_vocab_size")
        rank = found["markov_head.markov_w1.weight"].shape[-1] if "markov_head.markov_w1.weight" in names else 0
        more = {
            "layout": layout,
            "fused": found["fc.weight"].shape[-1],
            "model_type": block_type(names),
            "draft_vocab_size": size or (None if own_head is None else len(own_head)),
            "markov_rank": rank,
            "selector": any(name.startswith("candidate_selector.") for name in names),
            "confidence": any(name.startswith("confidence_head.") for name in names),
        }
        return {**settings, _READ: more}, found

    @classmethod
    def _fields(cls, settings: Any) -> dict[str, Any]:
        more = settings[_READ]
        block = settings.get("transformer_layer_config", settings)
        try:
            found = block_fields({**block, "model_type": more["model_type"]})
        except ValueError as error:
            raise ValueError(str(error) if block is not settings else str(error).replace(WHERE, "")) from None
        swa = value_of(settings, f"{_NESTED}.swa_window_size")
        layers, both_ways = found["layers"], bool(_stated(settings, "use_swa"))
        if both_ways and swa:
            found["windows"] = (swa,) * layers
        width = settings.get("target_hidden_size") or found["width"]
        count = more["fused"] // width
        ways = next((each for name in ("causal", "is_causal") if (each := _stated(settings, name)) is not None), None)
        sliding = [bool(each) for each in found["windows"]] or [False] * layers
        plain = both_ways or _stated(settings, "sliding_window_non_causal")
        causal = [ways] * layers if ways is not None else [each and not plain for each in sliding]
        rank, anchor = _stated(settings, "markov_rank") or 0, _stated(settings, "sample_from_anchor")
        if rank != more["markov_rank"]:
            raise ValueError(f"markov_rank={rank}, but the weights have {more['markov_rank']}")
        mask = mask_token_of(settings, _NESTED)
        if mask is None:
            raise ValueError(f"no mask token: {MASK_KEYS[0]} is missing")
        verifier = value_of(settings, "speculators_config.verifier.name_or_path")
        return {
            **found,
            "target": str(verifier or f"an unnamed target ({more['layout'].name})"),
            "target_fingerprint": value_of(settings, "speculators_config.verifier.fingerprint") or "",
            "target_width": width,
            "draft_vocab_size": more["draft_vocab_size"] or found["vocab_size"],
            "depths": _depths(settings, more["layout"], count),
            "rows": _stated(settings, "block_size") or 16,
            "mask_token": mask,
            # flat keys of DeepSpec say it by the class only
            "anchor_predicts": bool("markov_rank" in settings if anchor is None else anchor),
            "causal": tuple(map(bool, causal)),
            "markov_rank": rank,
            "markov_kind": _stated(settings, "markov_head_type") or "vanilla",
            "confidence": more["confidence"],
            **({ours: _number(settings, key) for ours, key in _DFLASH2.items()} if more["selector"] else {}),
            "embedding_scale": float(_stated(settings, "input_embedding_scale") or 1),
            "logit_scale": float(_stated(settings, "output_multiplier") or 1),
            "logit_cap": float(_stated(settings, "final_logit_softcapping") or 0),
            "target_layers": settings.get("num_target_layers") or 0,
            "silent": frozenset(
                name
                for name, value in (
                    ("final_norm", None),
                    ("depths", _stated_ids(settings, more["layout"])),
                    ("embedding_scale", _stated(settings, "input_embedding_scale")),
                )
                if value is None
            ),
        }

    def _settings(self) -> dict[str, Any]:
        config = self.config
        kind = "dspark" if config.markov_rank else "dflash"
        head = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_kind,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence,
        }
        return {
            "architectures": ["DSparkSpeculator" if config.markov_rank else "DFlashSpeculator"],
            "speculators_model_type": kind,
            "speculators_config": speculators_config(kind, config, config.slots),
            "transformer_layer_config": {**block_settings(config), "model_type": "qwen3"},
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_width,
            "num_target_layers": config.target_layers,
            "aux_hidden_state_layer_ids": list(config.depths),
            "block_size": config.rows,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": config.anchor_predicts,
            "sliding_window_non_causal": not any(config.causal),
            **({"causal": True} if all(config.causal) and not all(config.windows or (0,)) else {}),
            **(head if config.markov_rank else {}),
            **({key: getattr(config, ours) for ours, key in _DFLASH2.items()} if config.selector_rank else {}),
        }


def _depths(settings: Mapping[str, Any], layout: Layout, count: int) -> tuple[int, ...]:
    """Depths of the fused states: of the config, or those that DFlash spreads over the target's layers."""
    ids = _stated_ids(settings, layout)
    if ids is None:
        layers = settings.get("num_target_layers")
        if type(layers) is not int or count < 2:
            raise ValueError(f"{layout.ids.replace('|', ' or ')} is missing, and num_target_layers does not replace it")
        return spread_depths(count, layers)
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise ValueError(f"target_layer_ids={ids!r}: a list of layers")
    return layout.depths(ids)


def _number(settings: Mapping[str, Any], key: str) -> int:
    value = _stated(settings, key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r}: a number from 1 on, as there is a selector")
    return value


def _stated_ids(settings: Mapping[str, Any], layout: Layout) -> Any:
    return next((each for key in layout.ids.split("|") if (each := value_of(settings, key)) is not None), None)
