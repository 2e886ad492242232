"""A model's modules under one set of names, whatever its family calls them (families.py)."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from foretoken.forward.stored_embedding import dtype_of
from foretoken.models.adoption.families import FAMILIES, Family
from foretoken.native.layout import Rotary

_ACTIVATIONS = {
    type(ACT2FN[name]): ours
    for name, ours in (
        ("silu", "silu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
        ("relu2", "relu_squared"),
    )
}
_GPT_OSS_GATE = (1.702, 7.0)  # alpha and limit


class Way(NamedTuple):
    """Through an MLP: names of what projects into it and out of it.

    Attributes:
        gated: the input projections give a gate and another factor, in one matrix or in two.
    """

    into: tuple[str, ...]
    out: str
    gated: bool


_WAYS = (
    Way(("gate_proj", "up_proj"), "down_proj", gated=True),
    Way(("gate_up_proj",), "down_proj", gated=True),
    Way(("input_linear",), "output_linear", gated=True),
    Way(("up_proj",), "down_proj", gated=False),
    Way(("dense_h_to_4h",), "dense_4h_to_h", gated=False),
    Way(("fc1",), "fc2", gated=False),
    Way(("c_fc",), "c_proj", gated=False),
    Way(("w1", "w3"), "w2", gated=True),  # LFM2's, through SiLU
)
_HEADS = ("q_proj", "k_proj", "v_proj")
_GATED_HEADS = ("q_proj", "gate_proj", "k_proj", "v_proj")  # AFMoE's: a gate of each head's output
_MIXERS = (  # projections to the gate and the convolution's channels, to a row's steps, and from the gated rows
    (("in_proj",), (), "out_proj"),
    (("in_proj_z", "in_proj_qkv"), ("in_proj_a", "in_proj_b"), "out_proj"),  # Qwen3.5's delta nets
    (("in_proj_qkvz",), ("in_proj_ba",), "out_proj"),  # Qwen3-Next's, by groups of heads
    (("g_proj", "q_proj", "k_proj", "v_proj"), ("a_proj", "b_proj"), "o_proj"),  # OLMo's
)
INPUT = ("per_layer_input_gate", "per_layer_projection")  # of a layer's own input
ROUTERS = ("gate", "wg")  # in AFMoE's and Hunyuan's routers
_COMPRESSED = "kv_a_proj_with_mqa"  # keys and values of latent attention
_BY_HEAD = "query_key_value"  # one projection: outputs are a head's query, key and value, then the next head's


class Layer(NamedTuple):
    """A layer's modules; None where it has no such part. With experts, ``mlp`` is the MLP next to them.

    Attributes:
        opening: gate of the MLP next to experts.
        correction: added to the experts' scores for their choice; or None.
        block: the module with the experts.
        whole: the layer.
    """

    attention: Any
    mixer: Any
    mlp: Any
    norm: Any
    end_norm: Any
    mlp_norm: Any
    mlp_end_norm: Any
    experts: Any
    router: Any
    opening: Any
    correction: Any
    block: Any
    whole: Any

    @property
    def norms(self) -> tuple[Any, Any, Any, Any]:
        """Before attention and after it, before the MLP and after it."""
        return self.norm, self.end_norm, self.mlp_norm, self.mlp_end_norm

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of attention's input projections: queries, perhaps gates, keys and values, or one for all."""
        if hasattr(self.attention, "gate_proj"):
            return _GATED_HEADS
        if hasattr(self.attention, _COMPRESSED):
            return ("q_a_proj" if len(self.expansions) > 1 else "q_proj", _COMPRESSED)
        if getattr(self.attention, "is_kv_shared_layer", False):
            return _HEADS[:1]
        if getattr(self.attention, "v_proj", self) is None:  # values are the projections to keys
            return _HEADS[:2]
        return next(((name,) for name in ("qkv_proj", "c_attn", _BY_HEAD) if hasattr(self.attention, name)), _HEADS)

    @property
    def expansions(self) -> tuple[str, ...]:
        """Names of the products of compressed queries, if there are any, and of compressed keys and values."""
        names = ("q_b_proj", "kv_b_proj")
        return tuple(name for name in names if getattr(self.attention, name, None) is not None)

    @property
    def by_head(self) -> bool:
        """Whether one projection gives a head's query, key and value side by side."""
        return self.heads == (_BY_HEAD,)

    @property
    def out(self) -> str:
        """Name of attention's output projection."""
        return next((name for name in ("dense", "out_proj", "c_proj") if hasattr(self.attention, name)), "o_proj")

    @property
    def opens(self) -> bool:
        """Whether the projection to queries also gives a gate of each head's output, after the head's query."""
        if self.attention is None or self.heads != _HEADS:
            return False
        return bool(self.attention.q_proj.out_features == 2 * getattr(self.attention, self.out).in_features)

    @property
    def scoring(self) -> Any:
        """The module with the weight that scores experts: the router, or a part of it."""
        return next((found for name in ROUTERS if (found := getattr(self.router, name, None)) is not None), self.router)

    @property
    def mixing(self) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Names of the mixer's projections: to z and the convolution's input, to the steps alone, and out of it."""
        return next((each for each in _MIXERS if hasattr(self.mixer, each[0][0])), _MIXERS[0])

    @property
    def way(self) -> Way:
        """Through the MLP."""
        return next((way for way in _WAYS if all(hasattr(self.mlp, name) for name in (*way.into, way.out))), _WAYS[0])

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """The linear layers to pack, as (parent, name)."""
        parts = (
            (self.attention, (*self.heads, *self.expansions, self.out)),
            (self.mixer, (*self.mixing[0], *self.mixing[1], self.mixing[2])),
            (self.mlp, (*self.way.into, self.way.out)),
            (self.whole if hasattr(self.whole, INPUT[0]) else None, INPUT),
        )
        return [(part, name) for part, names in parts if part is not None for name in names]

    @property
    def activation(self) -> str | None:
        """Of the MLP's gate or the experts', as layouts call it; None for one that they do not know."""
        gated = self.experts if self.mlp is None else self.mlp
        if (getattr(gated, "alpha", None), getattr(gated, "limit", None)) == _GPT_OSS_GATE:
            return "clamped_swiglu"
        if hasattr(gated, "w1") or getattr(gated, "act_fn", None) is F.silu:  # LFM2's
            return "silu"
        names = ("act_fn", "activation_fn", "activation", "act")
        module = next((found for name in names if (found := getattr(gated, name, None)) is not None), None)
        return _ACTIVATIONS.get(type(module))


class Factors(NamedTuple):
    """Constant factors of a layer (Falcon-H1): of attention's input, keys and output; of a mixer's output; of an MLP's
    gate and output."""

    attention_in: float
    key: float
    attention_out: float
    mixer_out: float
    gate: float
    mlp_out: float


class Parts(NamedTuple):
    """A model's modules under one set of names.

    Attributes:
        parallel: MLPs have the input of attention.
    """

    family: Family
    parallel: bool
    body: Any
    layers: list[Layer]
    embedding: Any
    final_norm: Any

    @property
    def attention(self) -> Any:
        """The first layer's that has some; None if none has."""
        return next(iter(self.attentions), None)

    @property
    def attentions(self) -> list[Any]:
        """Of the layers that have one."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def has_inputs(self) -> bool:
        """Whether each layer has an input of its own."""
        return hasattr(self.layers[0].whole, INPUT[0])

    @property
    def mlp_widths(self) -> set[int]:
        """Inner widths of the MLPs."""
        return {int(getattr(layer.mlp, layer.way.out).in_features) for layer in self.layers if layer.mlp is not None}

    def factors(self, index: int) -> Factors:
        """A layer's."""
        whole, layer = getattr(self.body, self.family.layers)[index], self.layers[index]
        named = (
            (whole, "attention_in_multiplier"),
            (layer.attention, "key_multiplier"),
            (whole, "attn_out_multiplier"),
            (whole, "ssm_out_multiplier"),
            (layer.mlp, "gate_multiplier"),
            (layer.mlp, "down_multiplier"),
        )
        return Factors._make(float(getattr(module, name, 1.0)) for module, name in named)

    def gain(self, norm: Any) -> Tensor | None:
        """The gain of a norm."""
        if norm is None:
            return None
        if not hasattr(norm, "weight"):  # OLMo's
            return torch.ones(norm.normalized_shape)
        weight: Tensor = norm.weight
        return weight if not self.family.gain_offset else weight.float() + self.family.gain_offset

    def shift(self, norm: Any) -> Tensor | None:
        """The bias of a norm."""
        return None if norm is None else getattr(norm, "bias", None)

    def head_gain(self, attention: Any, which: str) -> Tensor | None:
        """Of the norms of its heads' queries ("q") or keys ("k"); [heads, d] where each head has its own."""
        names = (f"{which}_norm", f"{which}_layernorm", {"q": "query_layernorm", "k": "key_layernorm"}[which])
        norm = next((found for name in names if (found := getattr(attention, name, None)) is not None), None)
        own = getattr(norm, "norms", None)
        return self.gain(norm) if own is None else torch.stack([each.weight for each in own])

    @property
    def rotary_kinds(self) -> dict[str | None, str]:
        """How positions are rotated, by type of layer, or by None where all do alike; empty where none are."""
        if self.attention is None or getattr(self.body, self.family.rotary, None) is None:
            return {}
        kinds = getattr(self.body, self.family.rotary).rope_type
        return dict(kinds) if isinstance(kinds, dict) else {None: kinds}

    def rotary_of(self, attention: Any) -> str | None:
        """The key of a layer's rotary."""
        if None in self.rotary_kinds:
            return None
        return getattr(attention, "layer_type", None) or attention.attention_type

    def rotary(self, kind: str | None, max_length: int) -> Rotary:
        """A rotary as the library computes it."""
        module, others = getattr(self.body, self.family.rotary), () if kind is None else (kind,)

        rope = getattr(self.attention.config, "rope_parameters", None) or {}
        beta = rope.get("llama_4_scaling_beta")  # queries grow beyond the context of the first training

        def at(positions_N: Tensor) -> tuple[Tensor, ...]:
            # tables are made by the piece; beyond the last position some kinds turn to other frequencies for all of it
            served_1N = positions_N.clamp(max=max_length - 1)[None]
            found = module(torch.zeros(1, 1, dtype=torch.float32), served_1N, *others)
            if isinstance(found, Tensor):  # DeepSeek-V2's, complex
                return found[0].real.contiguous(), found[0].imag.contiguous()
            cos, sin = found
            half = cos.shape[-1] // (1 if self.family.single else 2)
            if self.family.doubled:
                return cos[0, :, ::2].contiguous(), sin[0, :, ::2].contiguous()
            tables = cos[0, :, :half], sin[0, :, :half]
            if beta is None:
                return tables
            times_N = torch.floor(served_1N[0] / rope["original_max_position_embeddings"])
            return *tables, 1 + beta * torch.log(1 + times_N)

        return at

    @property
    def position_embedding(self) -> Tensor | None:
        """Learned position embedding, [positions, D]."""
        if self.family.position_embedding is None:
            return None
        table: Tensor = getattr(self.body, self.family.position_embedding).weight
        return table[self.family.first_position :]

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings, in the embedding module or after it."""
        own = getattr(self.embedding, "embed_scale", None)
        if own is not None:
            return float(own.to(dtype_of(self.embedding)))
        if getattr(self.body.config, "mup_enabled", False):  # AFMoE's
            return float(self.body.config.hidden_size**0.5)
        return float(getattr(self.body, "embedding_multiplier", 1.0))


def head_dim_of(attention: Any) -> int:
    """The width of a head of an attention module; of latent attention that of keys, which is the larger one."""
    names = ("qk_head_dim", "head_size", "head_dim")
    return int(next(found for name in names if (found := getattr(attention, name, None)) is not None))


def parts_of(model: Any) -> Parts:
    """The parts of a model of one of ``FAMILIES``."""
    family = FAMILIES[model.config.model_type]
    body = model.get_submodule(family.body)
    parallel = bool(getattr(model.config, "use_parallel_residual", family.parallel))
    layers = []
    for layer in getattr(body, family.layers):
        attention, mixer, mlp = _thirds(family, layer)
        experts, block, router, opening, correction = getattr(mlp, "experts", None), mlp, None, None, None
        if experts is not None:
            correction = _correction(mlp, getattr(mlp, family.router, None))
            router, opening = getattr(mlp, family.router, None), getattr(mlp, f"{family.shared}_gate", None)
            mlp = getattr(mlp, str(family.shared), getattr(layer, str(family.shared), None))
        like = family if mixer is None else family.mixed_like or family
        norm, end_norm, mlp_norm, mlp_end_norm = (
            None if name is None else getattr(layer, name, None)
            for name in (like.attention_norm, like.attention_end_norm, like.mlp_norm, like.mlp_end_norm)
        )
        if parallel and mlp_norm is None:  # StableLM's parallel blocks have one
            mlp_norm = norm
        norms = norm, end_norm, mlp_norm, mlp_end_norm
        layers.append(Layer(attention, mixer, mlp, *norms, experts, router, opening, correction, block, layer))
    return Parts(family, parallel, body, layers, getattr(body, family.embedding), getattr(body, family.final_norm))


def _correction(block: Any, router: Any) -> Any:
    """The addend of the experts' scores, for their choice: in the router, in a part of it (Ernie), or around it."""
    found = (
        getattr(each, "e_score_correction_bias", None) for each in (router, getattr(router, "moe_statics", 0), block)
    )
    return next((each for each in found if each is not None), getattr(block, "expert_bias", None))  # LFM2's


def _thirds(family: Family, layer: Any) -> tuple[Any, Any, Any]:
    """A layer's attention, mixer, and MLP or module with experts; None for a missing part."""
    if family.alone is not None:
        part = getattr(layer, family.alone)
        if hasattr(part, "in_proj"):
            return None, part, None
        return (part, None, None) if hasattr(part, "q_proj") else (None, None, part)
    mlp = getattr(layer, family.mlp, None) if family.mlp else layer
    if mlp is None and family.shared is not None:
        mlp = getattr(layer, family.shared, None)
    return getattr(layer, family.attention, None), getattr(layer, family.mixer, None), mlp
