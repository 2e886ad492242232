"""The families of transformers that the native decoder supports: the names of their parts, and the steps between
them.

A family is a row of this table with its differences from Llama. Numbers (scales, caps, windows)
are read from the model at hand. A model that looks like a family but computes something else is detected when it is
tried (trial.py).

    norms        llama    x + attention(norm(x))                  before each branch
                 olmo2    x + norm(attention(x))                  after it
                 gemma2   x + norm(attention(norm(x)))            both
    parallel     cohere   x + attention(norm(x)) + mlp(norm(x))
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from foretoken.forward.stored_embedding import dtype_of
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
ROUTERS = ("gate", "wg")  # in AFMoE's and Hunyuan's routers
_BY_HEAD = "query_key_value"  # one projection: outputs are a head's query, key and value, then the next head's


@dataclass(frozen=True, slots=True)
class Family:
    """One model type.

    Attributes:
        body: of the causal model, which holds everything but the head.
        layers, embedding, final_norm: in the body.
        rotary: in the body, what computes rotary tables.
        position_embedding: in the body, the learned position embedding, and how many of its rows come before the first
            position's; or None.
        attention, mixer, mlp: of a layer; if a layer has no such name, it lacks the part. An MLP
            without a name is in the layer itself.
        router: in the module in the MLP's place, if it has ``experts``.
        shared: an MLP next to the experts, in the layer or in the module with the experts; in a layer without experts,
            the MLP; or None.
        alone: of layers that are attention or a mixer or an MLP and no more, the part, whichever it is; or None.
        attention_norm, attention_end_norm: of a layer, before attention (or the mixer) and after it; or None.
        mlp_norm, mlp_end_norm: the same of the MLP.
        mixed_like: the names of norms in layers with a mixer; None: as in others.
        centred: norms are LayerNorms.
        gain_offset: a norm multiplies by this plus its weight.
        parallel: the MLP has the input of attention; a setting in the config takes precedence.
        interleaved: rotary pairs neighbours.
        doubled: of the library's rotary tables, each angle stands twice side by side, not once in each half.
        single: of the library's rotary tables, each angle stands once.
        rotates_windows: layers without a window are not rotated.
        one_window: all layers have the config's window; else each has its own.
        caps_scores: attention scores are capped as the config says; a few configs say so for nothing.
    """

    body: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"
    position_embedding: tuple[str, int] | None = None
    attention: str = "self_attn"
    mixer: str = "mixer"
    mlp: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    alone: str | None = None
    attention_norm: str | None = "input_layernorm"
    attention_end_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_end_norm: str | None = None
    mixed_like: "Family | None" = None
    centred: bool = False
    gain_offset: float = 0.0
    parallel: bool = False
    interleaved: bool = False
    doubled: bool = False
    single: bool = False
    rotates_windows: bool = False
    one_window: bool = False
    caps_scores: bool = False


_BEHIND = Family(  # OLMo's
    attention_norm=None,
    attention_end_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_end_norm="post_feedforward_layernorm",
)
_AROUND = Family(  # Gemma's
    attention_end_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_end_norm="post_feedforward_layernorm",
    gain_offset=1.0,
)
_COHERE = Family(mlp_norm="input_layernorm", centred=True, parallel=True, interleaved=True, doubled=True)
_DELTA = Family(mixer="linear_attn", shared="shared_expert", gain_offset=1.0)
_LFM2 = Family(
    final_norm="embedding_norm", mixer="conv", mlp="feed_forward", attention_norm="operator_norm", mlp_norm="ffn_norm"
)
FAMILIES = {
    "llama": Family(),
    "arcee": Family(),
    "mistral": Family(one_window=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
    "ministral3": Family(one_window=True),
    "hunyuan_v1_dense": Family(),
    "ministral": Family(),
    "seed_oss": Family(),
    "cwm": Family(),
    "helium": Family(interleaved=True),
    "granite": Family(),
    "granitemoe": Family(mlp="block_sparse_moe", router="router"),
    "granitemoeshared": Family(mlp="block_sparse_moe", router="router", shared="shared_mlp"),
    "mixtral": Family(one_window=True),
    "qwen2_moe": Family(shared="shared_expert"),
    "qwen3_moe": Family(),
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "olmoe": Family(),
    "gpt_oss": Family(router="router", single=True),
    "glm4_moe": Family(shared="shared_experts"),
    "dots1": Family(shared="shared_experts"),
    "exaone_moe": Family(shared="shared_experts", rotates_windows=True),
    "solar_open": Family(shared="shared_experts"),
    "minimax_m2": Family(),
    "hunyuan_v1_moe": Family(shared="shared_mlp"),
    "afmoe": Family(
        router="router",
        shared="shared_experts",
        attention_end_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_end_norm="post_mlp_layernorm",
        rotates_windows=True,
    ),
    "ernie4_5_moe": Family(shared="shared_experts", interleaved=True),
    "phi3": Family(one_window=True),
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
    "olmo_hybrid": replace(_BEHIND, mixer="linear_attn", mixed_like=Family()),
    "exaone4": replace(_BEHIND, rotates_windows=True),
    "olmo": Family(centred=True),
    "gemma": Family(gain_offset=1.0),
    "gemma2": replace(_AROUND, caps_scores=True),
    "gemma3_text": _AROUND,
    "vaultgemma": Family(mlp_norm="pre_feedforward_layernorm", gain_offset=1.0, caps_scores=True),
    "glm": Family(interleaved=True),
    "glm4": Family(attention_end_norm="post_self_attn_layernorm", mlp_end_norm="post_mlp_layernorm", interleaved=True),
    "ernie4_5": Family(interleaved=True),
    "gpt_neox": Family(
        body="gpt_neox", embedding="embed_in", final_norm="final_layer_norm", attention="attention", centred=True
    ),
    "gpt2": Family(
        body="transformer",
        layers="h",
        embedding="wte",
        final_norm="ln_f",
        position_embedding=("wpe", 0),
        attention="attn",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        centred=True,
    ),
    "phi": Family(final_norm="final_layernorm", mlp_norm="input_layernorm", centred=True, parallel=True),
    "opt": Family(
        body="model.decoder",
        final_norm="final_layer_norm",
        position_embedding=("embed_positions", 2),
        mlp="",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        centred=True,
    ),
    "stablelm": Family(centred=True),
    "starcoder2": Family(centred=True, one_window=True),
    "nemotron": Family(centred=True, gain_offset=1.0),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rotates_windows=True),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, rotary="pos_emb"),
    "mamba2": Family(body="backbone", embedding="embeddings", final_norm="norm_f", attention_norm="norm"),
    "bamba": Family(final_norm="final_layernorm", mixer="mamba", mlp="feed_forward", mlp_norm="pre_ff_layernorm"),
    "falcon_h1": Family(final_norm="final_layernorm", mixer="mamba", mlp="feed_forward", mlp_norm="pre_ff_layernorm"),
    "granitemoehybrid": Family(mixer="mamba", mlp="block_sparse_moe", router="router", shared="shared_mlp"),
    "nemotron_h": Family(
        embedding="embeddings", final_norm="norm_f", alone="mixer", attention_norm="norm", mlp_norm="norm"
    ),
}


class Layer(NamedTuple):
    """A layer's modules; None where it has no such part. With experts, ``mlp`` is the MLP next to them.

    Attributes:
        opening: gate of the MLP next to experts.
        correction: added to the experts' scores for their choice; or None.
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

    @property
    def norms(self) -> tuple[Any, Any, Any, Any]:
        """Before attention and after it, before the MLP and after it."""
        return self.norm, self.end_norm, self.mlp_norm, self.mlp_end_norm

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of attention's input projections: queries, perhaps gates, keys and values, or one for all."""
        if hasattr(self.attention, "gate_proj"):
            return _GATED_HEADS
        return next(((name,) for name in ("qkv_proj", "c_attn", _BY_HEAD) if hasattr(self.attention, name)), _HEADS)

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
            (self.attention, (*self.heads, self.out)),
            (self.mixer, (*self.mixing[0], *self.mixing[1], self.mixing[2])),
            (self.mlp, (*self.way.into, self.way.out)),
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
        return next((layer.attention for layer in self.layers if layer.attention is not None), None)

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
            cos, sin = module(torch.zeros(1, 1, dtype=torch.float32), served_1N, *others)
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
        name, before = self.family.position_embedding
        table: Tensor = getattr(self.body, name).weight
        return table[before:]

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings, in the embedding module or after it."""
        own = getattr(self.embedding, "embed_scale", None)
        if own is not None:
            return float(own.to(dtype_of(self.embedding)))
        if getattr(self.body.config, "mup_enabled", False):  # AFMoE's
            return float(self.body.config.hidden_size**0.5)
        return float(getattr(self.body, "embedding_multiplier", 1.0))


def parts_of(model: Any) -> Parts:
    """The parts of a model of one of ``FAMILIES``."""
    family = FAMILIES[model.config.model_type]
    body = model.get_submodule(family.body)
    parallel = bool(getattr(model.config, "use_parallel_residual", family.parallel))
    layers = []
    for layer in getattr(body, family.layers):
        attention, mixer, mlp = _thirds(family, layer)
        experts, router, opening, correction = getattr(mlp, "experts", None), None, None, None
        if experts is not None:
            correction = _correction(mlp, getattr(mlp, family.router, None))
            router, opening = getattr(mlp, family.router, None), getattr(mlp, f"{family.shared}_gate", None)
            mlp = getattr(mlp, str(family.shared), getattr(layer, str(family.shared), None))
        like = family if mixer is None else family.mixed_like or family
        norm, end_norm, mlp_norm, mlp_end_norm = (
            None if name is None else getattr(layer, name, None)
            for name in (like.attention_norm, like.attention_end_norm, like.mlp_norm, like.mlp_end_norm)
        )
        parts = (
            attention,
            mixer,
            mlp,
            norm,
            end_norm,
            norm if parallel and mlp_norm is None else mlp_norm,  # StableLM's parallel blocks have one
            mlp_end_norm,
            experts,
            router,
            opening,
            correction,
        )
        layers.append(Layer._make(parts))
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
