"""The sizes and options of an EAGLE network, and their form in the speculators format.

    config.json  {"speculators_model_type": "eagle3",               or "eagle": EAGLE-1/2, as before version 0.5
                  "speculators_config": {"algorithm": ..., "proposal_methods": [...], "verifier": {...}},
                  "transformer_layer_config": {...},                of the block, and the target's vocab_size
                  "draft_vocab_size": 2048, "eagle_aux_hidden_state_layer_ids": [1, 4, 7], ...}

A folder of another tool has no fingerprint; its shapes are compared with the target's instead. The layouts of other
makers are brought into this form first (makers.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.published.blocks import LayersConfig, block_fields, block_settings, speculators_config
from foretoken.drafting.published.layouts import MASK_KEYS

EAGLE2, EAGLE3 = "eagle", "eagle3"
EITHER = "ids that count inputs or outputs"  # key of configs that do not say which
UNKNOWN = ""  # the fingerprint of a folder without one
SPECULATIVE_TOKENS = 5  # draft length that our folders recommend to other engines
_LAYER = "LlamaDecoderLayer"  # layer class of EAGLE-1/2
_ARCHITECTURES = {EAGLE2: ["EagleSpeculator", _LAYER], EAGLE3: ["Eagle3Speculator"]}


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayersConfig):
    """The sizes and options of a network, and its target.

    Attributes:
        algorithm: "eagle3", or "eagle" for EAGLE-1/2.
        depths: of the target's residual stream, in the order of fusion; empty: the published
            (2, L // 2, L - 3). EAGLE-2 reads the output of the final norm instead.
        fusion_bias: whether EAGLE-2's fusion has a bias.
        norm_before_residual: the block's residual starts from the normed feature.
        norm_before_fc, fc_norm: one norm over all fused depths together, or one for each.
        fused: False if an EAGLE-3 network reads the output of the final norm in place of fused depths.
        layers: those after the first are ordinary ones.
        mask_token: of P-EAGLE's further rows, which read ``mask_hidden`` in place of the target's states; None: EAGLE.
    """

    algorithm: str = EAGLE3
    depths: tuple[int, ...] = ()
    fusion_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    fused: bool = True
    mask_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fused and (self.norm_before_fc or self.fc_norm):
            raise ValueError("use_aux_hidden_state=false, but norm_before_fc or fc_norm is true")
        mask = 0 if self.mask_token is None else self.mask_token
        if type(mask) is not int or not 0 <= mask < self.vocab_size:
            raise ValueError(f"{MASK_KEYS[0]}={mask!r}: a token of {self.vocab_size}")
        if any(type(each) is not int or each < 1 for each in self.depths):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={list(self.depths)!r}: depths count from 1")

    @property
    def taps(self) -> Taps:
        unfused = self.algorithm == EAGLE2 or not self.fused
        return Taps(self.depths, final=self.final_norm or (unfused and not self.depths))


def to_settings(config: EagleConfig) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    settings: dict[str, Any] = {
        "architectures": _ARCHITECTURES[config.algorithm],
        "speculators_model_type": config.algorithm,
        "speculators_config": speculators_config(config.algorithm, config, SPECULATIVE_TOKENS),
        "transformer_layer_config": block_settings(config),
    }
    if config.algorithm == EAGLE2:
        return {
            **settings,
            "transformer_layer_architecture": _LAYER,
            "layernorms": False,
            "fusion_bias": config.fusion_bias,
        }
    return {
        **settings,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_width,
        "eagle_aux_hidden_state_layer_ids": list(config.depths) or None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **({} if config.mask_token is None else {MASK_KEYS[0]: config.mask_token}),
        **({} if config.fused else {"use_aux_hidden_state": False}),
    }


def from_settings(settings: Any) -> dict[str, Any]:
    """Return the fields of an :class:`EagleConfig` from a ``config.json``.

    Raises:
        ValueError: it describes another or an unsupported network; the message names the field.
    """
    if not isinstance(settings, dict):
        raise ValueError("config.json is not an object")
    algorithm = settings.get("speculators_model_type")
    if algorithm not in (EAGLE2, EAGLE3):
        raise ValueError(f"speculators_model_type={algorithm!r}: an EAGLE head has '{EAGLE3}' or '{EAGLE2}'")
    owner = _object(settings, "speculators_config")
    if owner.get("algorithm") != algorithm:
        raise ValueError(
            f"speculators_config.algorithm={owner.get('algorithm')!r}, but speculators_model_type is '{algorithm}'"
        )
    verifier = _object(owner, "verifier", "speculators_config.")
    found = {
        "target": str(verifier.get("name_or_path") or "an unnamed target"),
        "target_fingerprint": verifier.get("fingerprint", UNKNOWN),
        "algorithm": algorithm,
        # EAGLE-1/2 has one layer; its config may be the target's, with another number
        **block_fields(_object(settings, "transformer_layer_config"), 1 if algorithm == EAGLE2 else None),
    }
    if algorithm == EAGLE2:
        layer = settings.get("transformer_layer_architecture", _LAYER)
        if layer != _LAYER:
            raise ValueError(f"transformer_layer_architecture={layer!r}: known is {_LAYER}")
        if settings.get("layernorms"):
            raise ValueError("layernorms=true: heads with norms around the fusion are not computed here; use EAGLE-3")
        return {
            **found,
            "target_width": found["width"],
            "draft_vocab_size": found["vocab_size"],
            "fusion_bias": settings.get("fusion_bias", False),
        }
    ids = settings.get("eagle_aux_hidden_state_layer_ids") or []
    if not isinstance(ids, list):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids={ids!r}: a list of depths")
    if "draft_vocab_size" not in settings:
        raise ValueError("draft_vocab_size is missing")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {
        **found,
        "target_width": settings.get("target_hidden_size") or found["width"],
        "draft_vocab_size": settings["draft_vocab_size"],
        "depths": tuple(ids),
        "fused": settings.get("use_aux_hidden_state", True),
        "mask_token": settings.get(MASK_KEYS[0]),
        **{name: settings.get(name, False) for name in flags},
        "silent": frozenset(
            name
            for name, stated in (
                ("depths", ids and not settings.get(EITHER)),
                ("norm_before_residual", "norm_before_residual" in settings),
                ("final_norm", False),
            )
            if not stated
        ),
    }


def _object(settings: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
    found = settings.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{where}{name}={found!r}: an object")
    return found
