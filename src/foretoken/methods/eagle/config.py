"""The sizes and options of an EAGLE network, and their form in the speculators format.

    config.json  {"speculators_model_type": "eagle3",               or "eagle": EAGLE-1/2, as before version 0.5
                  "speculators_config": {"algorithm": ..., "proposal_methods": [...], "verifier": {...}},
                  "transformer_layer_config": {...},                of the block, and the target's vocab_size
                  "draft_vocab_size": 2048, "eagle_aux_hidden_state_layer_ids": [1, 4, 7], ...}

A folder of another tool has no fingerprint; its shapes are compared with the target's instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.description import Taps

EAGLE2, EAGLE3 = "eagle", "eagle3"
UNKNOWN = ""  # the fingerprint of a folder without one
SPECULATIVE_TOKENS = 5  # draft length that our folders recommend to other engines
_LAYER = "LlamaDecoderLayer"  # layer class of EAGLE-1/2
_ARCHITECTURES = {EAGLE2: ["EagleSpeculator", _LAYER], EAGLE3: ["Eagle3Speculator"]}
_BLOCKS = ("llama", "qwen3")
_WHERE = "transformer_layer_config."


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary positions of Llama 3.1: low frequencies are divided, high ones stay; field names of transformers.

    Attributes:
        factor: divisor of the low frequencies.
        low_freq_factor, high_freq_factor: turns within the original context below which a frequency is low, and above
            which it is high; frequencies in between are interpolated.
        original_max_position_embeddings: the original context length.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        """Check the values of a file.

        Raises:
            ValueError: a value is impossible; the message names the field.
        """
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor!r} is not below {self.high_freq_factor!r}")

    def of(self, plain: Tensor) -> Tensor:
        """Return the scaled frequencies of plain ones, in radians a position."""
        turns = plain * (self.original_max_position_embeddings / (2 * math.pi))
        low, high = self.low_freq_factor, self.high_freq_factor
        fast = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return plain * (fast + (1.0 - fast) / self.factor)


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
        rope_scaling: of the block's rotary positions; None: no scaling.
    """

    flags = (*BlockConfig.flags, "fusion_bias", "norm_before_residual", "norm_before_fc", "fc_norm")

    algorithm: str = EAGLE3
    depths: tuple[int, ...] = ()
    fusion_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    rope_scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(type(each) is not int or each < 1 for each in self.depths):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={list(self.depths)!r}: depths count from 1")

    @property
    def taps(self) -> Taps:
        return Taps(final=True) if self.algorithm == EAGLE2 else Taps(self.depths)


def to_settings(config: EagleConfig) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    block = {
        "model_type": "qwen3" if config.norm_heads else "llama",
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": 1,
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
    }


def from_settings(settings: Any) -> dict[str, Any]:
    """Return the fields of an :class:`EagleConfig` from a ``config.json``.

    Raises:
        ValueError: it describes another or an unsupported network; the message names the field.
    """
    if not isinstance(settings, dict):
        raise ValueError("config.json is not an object")
    algorithm = settings.get("speculators_model_type")
    if algorithm is None:
        raise ValueError(
            "speculators_model_type is missing: convert a folder of EAGLE's own code to the speculators format "
            "with 'speculators convert'"
        )
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
        **{name: settings.get(name, False) for name in flags},
    }


def _block(block: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the fields from ``transformer_layer_config``."""
    known: dict[str, tuple[Any, ...]] = {"model_type": _BLOCKS, "hidden_act": ("silu",)}
    if algorithm == EAGLE3:  # EAGLE-1/2 has one layer; its config may be the target's, with another number
        known["num_hidden_layers"] = (1,)
    for name, values in known.items():
        if block.get(name, values[0]) not in values:
            raise ValueError(f"{_WHERE}{name}={block[name]!r}: known is {' or '.join(map(str, values))}")
    if block.get("mlp_bias"):
        raise ValueError(f"{_WHERE}mlp_bias=true: an MLP with biases is not computed here")
    types = block.get("layer_types")
    if types is not None and any(each != "full_attention" for each in types):
        raise ValueError(f"{_WHERE}layer_types={types!r}: a layer that sees a window only is not computed here")
    if types is None and block.get("use_sliding_window"):
        raise ValueError(f"{_WHERE}use_sliding_window=true: a layer that sees a window only is not computed here")
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
            raise ValueError(f"{_WHERE}{name} is missing")
    found = {ours: block[theirs] for ours, theirs in names.items()}
    heads = found["heads"]
    if type(heads) is not int or heads < 1:
        raise ValueError(f"{_WHERE}num_attention_heads={heads!r}")
    return {
        **found,
        "kv_heads": block.get("num_key_value_heads") or heads,
        "head_dim": block.get("head_dim") or found["width"] // heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_heads": block.get("model_type") == "qwen3",
        "attention_bias": block.get("attention_bias", False),
        "max_length": block.get("max_position_embeddings") or 4096,
    }


def _positions(block: Mapping[str, Any]) -> tuple[Any, Llama3Scaling | None]:
    """Return rotary base and scaling of ``transformer_layer_config``; their keys depend on the version of
    transformers.
    """
    theta, said = block.get("rope_theta"), "rope_theta"
    found: dict[str, Llama3Scaling | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = block.get(name) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{_WHERE}{name}={rope!r}: an object")
        for key, value in rope.items():
            if isinstance(value, dict):
                raise ValueError(f"{_WHERE}{name}.{key}={value!r}: positions are the same for all layers here")
        if rope:
            found[name] = _scaling(rope, f"{_WHERE}{name}")
        _check_whole(rope, f"{name}.")
        other = rope.get("rope_theta")
        if theta is not None and other is not None and theta != other:
            raise ValueError(f"{_WHERE}{said}={theta!r}, but {name}.rope_theta={other!r}")
        if theta is None and other is not None:
            theta, said = other, f"{name}.rope_theta"
    _check_whole(block)
    kinds = list(found.values())
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ValueError(
            f"{_WHERE}rope_scaling={block['rope_scaling']!r}, but rope_parameters={block['rope_parameters']!r}"
        )
    return 10000.0 if theta is None else theta, kinds[0] if kinds else None


def _scaling(rope: Mapping[str, Any], where: str) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{where}.rope_type={kind!r}: known are default and llama3")
    names = [each.name for each in fields(Llama3Scaling)]
    for name in names:
        if name not in rope:
            raise ValueError(f"{where}.{name} is missing")
    try:
        return Llama3Scaling(**{name: rope[name] for name in names})
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _rope_parameters(config: EagleConfig) -> dict[str, Any]:
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {"rope_type": "llama3", "rope_theta": config.rope_theta, **asdict(config.rope_scaling)}


def _check_whole(settings: Mapping[str, Any], where: str = "") -> None:
    """Refuse partial rotary positions."""
    part = settings.get("partial_rotary_factor")
    if part is not None and part != 1:
        raise ValueError(f"{_WHERE}{where}partial_rotary_factor={part!r}: known is 1, all of each head")


def _object(settings: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
    found = settings.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{where}{name}={found!r}: an object")
    return found
