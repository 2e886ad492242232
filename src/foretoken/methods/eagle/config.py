"""The sizes and options of an EAGLE network, and their form in the speculators format.

    config.json  {"speculators_model_type": "eagle3",               or "eagle": EAGLE-1/2, as before version 0.5
                  "speculators_config": {"algorithm": ..., "proposal_methods": [...], "verifier": {...}},
                  "transformer_layer_config": {...},                of the block, and the target's vocab_size
                  "draft_vocab_size": 2048, "eagle_aux_hidden_state_layer_ids": [1, 4, 7], ...}

A folder of another tool has no fingerprint; its shapes are compared with the target's instead. The layouts of other
makers are brought into this form first (makers.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.description import Taps

EAGLE2, EAGLE3 = "eagle", "eagle3"
UNKNOWN = ""  # the fingerprint of a folder without one
SPECULATIVE_TOKENS = 5  # draft length that our folders recommend to other engines
_LAYER = "LlamaDecoderLayer"  # layer class of EAGLE-1/2
_ARCHITECTURES = {EAGLE2: ["EagleSpeculator", _LAYER], EAGLE3: ["Eagle3Speculator"]}
MOST_LAYERS = 32
_BLOCKS = ("llama", "qwen3")
WHERE = "transformer_layer_config."
_SCALINGS = {  # kinds of rotary positions, and the numbers that each one needs
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_UNSCALED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeScaling:
    """Scaled rotary positions, as transformers computes them.

    Attributes:
        values: ``rope_type`` and the numbers of that kind, by the names of transformers.
    """

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, rope: Mapping[str, Any]) -> RopeScaling | None:
        """Return the scaling of ``rope_parameters`` or ``rope_scaling``; None: positions are not scaled.

        Raises:
            ValueError: it is of another kind, or a value is missing or impossible; the message names the field.
        """
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind not in _SCALINGS:
            raise ValueError(f"rope_type={kind!r}: known are default, {', '.join(_SCALINGS)}")
        for name in _SCALINGS[kind]:
            if name not in rope:
                raise ValueError(f"{name} is missing")
        found = {name: value for name, value in rope.items() if name not in _UNSCALED and value is not None}
        for name, value in found.items():
            if type(value) is not bool and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ValueError(f"{name}={value!r}")
        if kind == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
            raise ValueError(f"low_freq_factor={found['low_freq_factor']!r} is not below {found['high_freq_factor']!r}")
        return cls((("rope_type", kind), *sorted(found.items())))

    def frequencies(self, theta: float, head_dim: int) -> tuple[Tensor, float]:
        """Return the frequencies, float64 [d / 2] in radians a position, and the factor of cos and sin."""
        return _frequencies(self.values, float(theta), head_dim)


@cache
def _frequencies(values: tuple[tuple[str, Any], ...], theta: float, head_dim: int) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {**dict(values), "rope_theta": theta}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=settings)
    rates, gain = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    return rates.double(), float(gain)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(BlockConfig):
    """The sizes and options of a network, and its target.

    Attributes:
        algorithm: "eagle3", or "eagle" for EAGLE-1/2.
        depths: of the target's residual stream, in the order of fusion; empty: the published
            (2, L // 2, L - 3). EAGLE-2 reads the output of the final norm instead.
        fusion_bias: whether EAGLE-2's fusion has a bias.
        norm_before_residual: the block's residual starts from the normed feature.
        norm_before_fc, fc_norm: one norm over all fused depths together, or one for each.
        fused: False if an EAGLE-3 network reads the output of the final norm in place of fused depths.
        rope_scaling: of the layers' rotary positions; None: no scaling.
        layers: decoder layers; those after the first are ordinary ones.
        windows: positions that each layer sees; 0: all; empty: all, in every layer.
    """

    flags = (*BlockConfig.flags, "fusion_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "fused")
    sizes = (*BlockConfig.sizes, "layers")

    algorithm: str = EAGLE3
    depths: tuple[int, ...] = ()
    fusion_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    fused: bool = True
    rope_scaling: RopeScaling | None = None
    layers: int = 1
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers={self.layers}: {MOST_LAYERS} at most")
        if not self.fused and (self.norm_before_fc or self.fc_norm):
            raise ValueError("use_aux_hidden_state=false, but norm_before_fc or fc_norm is true")
        if any(type(each) is not int or each < 1 for each in self.depths):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={list(self.depths)!r}: depths count from 1")

    @property
    def taps(self) -> Taps:
        return Taps(final=True) if self.algorithm == EAGLE2 or not self.fused else Taps(self.depths)

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None: all."""
        return (self.windows[layer] or None) if self.windows else None


def to_settings(config: EagleConfig) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    block: dict[str, Any] = {
        "model_type": "qwen3" if config.norm_heads else "llama",
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": _rope_parameters(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab_size,
    }
    if config.windows:
        block["layer_types"] = ["sliding_attention" if each else "full_attention" for each in config.windows]
        block["sliding_window"] = max(config.windows)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    settings: dict[str, Any] = {
        "architectures": _ARCHITECTURES[config.algorithm],
        "speculators_model_type": config.algorithm,
        "speculators_config": {
            "algorithm": config.algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": config.target,
                "architectures": [],
                "fingerprint": config.target_fingerprint,
            },
        },
        "transformer_layer_config": block,
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
        **_block(_object(settings, "transformer_layer_config"), algorithm),
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
        **{name: settings.get(name, False) for name in flags},
    }


def _block(block: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the fields from ``transformer_layer_config``."""
    known: dict[str, tuple[Any, ...]] = {"model_type": _BLOCKS, "hidden_act": ("silu",)}
    for name, values in known.items():
        if block.get(name, values[0]) not in values:
            raise ValueError(f"{WHERE}{name}={block[name]!r}: known is {' or '.join(map(str, values))}")
    if block.get("mlp_bias"):
        raise ValueError(f"{WHERE}mlp_bias=true: an MLP with biases is not computed here")
    # EAGLE-1/2 has one layer; its config may be the target's, with another number
    layers = block.get("num_hidden_layers", 1) if algorithm == EAGLE3 else 1
    theta, scaling = _positions(block)
    names = {
        "width": "hidden_size",
        "mlp_width": "intermediate_size",
        "heads": "num_attention_heads",
        "norm_eps": "rms_norm_eps",
        "vocab_size": "vocab_size",
    }
    for name in names.values():
        if name not in block:
            raise ValueError(f"{WHERE}{name} is missing")
    found = {ours: block[theirs] for ours, theirs in names.items()}
    heads = found["heads"]
    if type(heads) is not int or heads < 1:
        raise ValueError(f"{WHERE}num_attention_heads={heads!r}")
    return {
        **found,
        "kv_heads": block.get("num_key_value_heads") or heads,
        "head_dim": block.get("head_dim") or found["width"] // heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_heads": block.get("model_type") == "qwen3",
        "attention_bias": block.get("attention_bias", False),
        "max_length": block.get("max_position_embeddings") or 4096,
        "layers": layers,
        "windows": _windows(block, layers),
    }


def _windows(block: Mapping[str, Any], layers: Any) -> tuple[int, ...]:
    """Return the window of each layer; empty: every layer sees all positions."""
    types, window = block.get("layer_types"), block.get("sliding_window")
    if types is None:
        types = ["sliding_attention"] * layers if block.get("use_sliding_window") and type(layers) is int else []
    if not isinstance(types, list) or any(each not in ("full_attention", "sliding_attention") for each in types):
        raise ValueError(f"{WHERE}layer_types={types!r}: known are full_attention and sliding_attention")
    if "sliding_attention" not in types:
        return ()
    if type(window) is not int or window < 1:
        raise ValueError(f"{WHERE}sliding_window={window!r}, but layer_types names sliding layers: a number")
    if len(types) != layers:
        raise ValueError(f"{WHERE}layer_types has {len(types)} entries for num_hidden_layers={layers!r}")
    return tuple(window if each == "sliding_attention" else 0 for each in types)


def _positions(block: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
    """Return rotary base and scaling of ``transformer_layer_config``; their keys depend on the version of
    transformers.
    """
    theta, said = block.get("rope_theta"), "rope_theta"
    found: dict[str, RopeScaling | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = block.get(name) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{WHERE}{name}={rope!r}: an object")
        for key, value in rope.items():
            if isinstance(value, dict):
                raise ValueError(f"{WHERE}{name}.{key}={value!r}: positions are the same for all layers here")
        if rope:
            found[name] = _scaling(rope, f"{WHERE}{name}")
        _check_whole(rope, f"{name}.")
        other = rope.get("rope_theta")
        if theta is not None and other is not None and theta != other:
            raise ValueError(f"{WHERE}{said}={theta!r}, but {name}.rope_theta={other!r}")
        if theta is None and other is not None:
            theta, said = other, f"{name}.rope_theta"
    _check_whole(block)
    kinds = list(found.values())
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ValueError(
            f"{WHERE}rope_scaling={block['rope_scaling']!r}, but rope_parameters={block['rope_parameters']!r}"
        )
    return 10000.0 if theta is None else theta, kinds[0] if kinds else None


def _scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    try:
        return RopeScaling.of(rope)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _rope_parameters(config: EagleConfig) -> dict[str, Any]:
    scaling = {"rope_type": "default"} if config.rope_scaling is None else dict(config.rope_scaling.values)
    return {**scaling, "rope_theta": config.rope_theta}


def _check_whole(settings: Mapping[str, Any], where: str = "") -> None:
    """Refuse partial rotary positions."""
    part = settings.get("partial_rotary_factor")
    if part is not None and part != 1:
        raise ValueError(f"{WHERE}{where}partial_rotary_factor={part!r}: known is 1, all of each head")


def _object(settings: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
    found = settings.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{where}{name}={found!r}: an object")
    return found
