"""Decoder layers of published draft networks: their fields, and how ``config.json`` states them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.block import BlockConfig

MOST_LAYERS = 32
WHERE = "transformer_layer_config."  # of the speculators format; elsewhere the keys lie at the top
_BLOCKS = ("llama", "qwen3")
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
    def of(cls, rope: Mapping[str, Any]) -> "RopeScaling | None":
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
class LayersConfig(BlockConfig):
    """The fields of the layers.

    Attributes:
        rope_scaling: of the layers' rotary positions; None: no scaling.
        layers: number of decoder layers.
        windows: positions that each layer sees; 0: all; empty: all, in every layer.
        final_norm: of the fused states that after the target's last layer is read after its final norm.
        silent: fields without a value in the maker's config, which probe.py may settle.
    """

    rope_scaling: RopeScaling | None = None
    layers: int = 1
    windows: tuple[int, ...] = ()
    final_norm: bool = False
    silent: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers={self.layers}: {MOST_LAYERS} at most")

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None: all."""
        return (self.windows[layer] or None) if self.windows else None


def speculators_config(algorithm: str, config: LayersConfig, length: int) -> dict[str, Any]:
    """Return the part of a ``config.json`` of the speculators format that names the target.

    Args:
        length: of drafts, for other engines.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "proposal_methods": [proposal],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": config.target, "architectures": [], "fingerprint": config.target_fingerprint},
    }


def block_settings(config: LayersConfig) -> dict[str, Any]:
    """Return the layers' part of a ``config.json``."""
    scaling = {"rope_type": "default"} if config.rope_scaling is None else dict(config.rope_scaling.values)
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
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab_size,
    }
    if config.windows:
        block["layer_types"] = ["sliding_attention" if each else "full_attention" for each in config.windows]
        block |= {"sliding_window": max(config.windows), "use_sliding_window": True}  # Qwen3 wants both
    return block


def block_fields(block: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    """Return the fields of a :class:`LayersConfig` from the keys of a Llama or a Qwen3.

    Args:
        layers: their number; None: the config's.
    Raises:
        ValueError: it describes other layers; the message names the field.
    """
    known: dict[str, tuple[Any, ...]] = {"model_type": _BLOCKS, "hidden_act": ("silu",)}
    for name, values in known.items():
        if block.get(name, values[0]) not in values:
            raise ValueError(f"{WHERE}{name}={block[name]!r}: known is {' or '.join(map(str, values))}")
    if block.get("mlp_bias"):
        raise ValueError(f"{WHERE}mlp_bias=true: an MLP with biases is not computed here")
    layers = block.get("num_hidden_layers", 1) if layers is None else layers
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


def block_type(tensors: Iterable[str]) -> str:
    """Return the ``model_type`` of layers by the names of their tensors."""
    return "qwen3" if any(name.endswith("self_attn.q_norm.weight") for name in tensors) else "llama"


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


def _check_whole(settings: Mapping[str, Any], where: str = "") -> None:
    """Refuse partial rotary positions."""
    part = settings.get("partial_rotary_factor")
    if part is not None and part != 1:
        raise ValueError(f"{WHERE}{where}partial_rotary_factor={part!r}: known is 1, all of each head")
