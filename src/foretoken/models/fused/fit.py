"""Which models of transformers the fused decoder fits, and how one of them is taken over and given back.

A module is not its weight: an adapter, a quantiser or a hook may compute something else around it. So only plain
modules are taken, and after packing the whole model is tried against what the library computed before (trial.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.models.fused import build, states
from foretoken.models.fused.decoder import FusedDecoder
from foretoken.models.fused.layout import Block, Layout, PackedBlock, Projection, StateBlock
from foretoken.models.fused.packing import TiledLinear, Tiles
from foretoken.models.fused.quantised import can_join
from foretoken.models.plain import own_ways, why_not_plain
from foretoken.models.quantised.weight import QuantisedLinear
from foretoken.models.ssm.layout import Mixer

_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "mamba2", "bamba"})
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the sequence at hand
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_MIXER = ("in_proj", "out_proj")


class _Layer(NamedTuple):
    """A layer's modules: attention or a mixer, perhaps an MLP, and the norms before them."""

    norm: Any
    attention: Any
    mixer: Any
    mlp: Any
    mlp_norm: Any

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Whose weights are packed, as (parent, name)."""
        parts = ((self.attention, _ATTENTION), (self.mixer, _MIXER), (self.mlp, _MLP))
        return [(part, name) for part, names in parts if part is not None for name in names]


class _Parts(NamedTuple):
    """A model's modules under one set of names."""

    layers: list[_Layer]
    embedding: Any
    final_norm: Any
    rotary: Any


def _parts(model: Any) -> _Parts:
    kind = model.config.model_type
    if kind == "mamba2":
        body = model.backbone
        mixing = [_Layer(layer.norm, None, layer.mixer, None, None) for layer in body.layers]
        return _Parts(mixing, body.embeddings, body.norm_f, None)
    body = model.model
    if kind == "bamba":
        layers = [
            _Layer(
                layer.input_layernorm,
                getattr(layer, "self_attn", None),
                getattr(layer, "mamba", None),
                layer.feed_forward,
                layer.pre_ff_layernorm,
            )
            for layer in body.layers
        ]
        return _Parts(layers, body.embed_tokens, body.final_layernorm, body.rotary_emb)
    layers = [
        _Layer(each.input_layernorm, each.self_attn, None, each.mlp, each.post_attention_layernorm)
        for each in body.layers
    ]
    return _Parts(layers, body.embed_tokens, body.norm, body.rotary_emb)


def misfit(model: Any, mixers: Sequence[Mixer] = ()) -> str | None:
    """Why the fused decoder cannot run this model; None if it can."""
    config = model.config
    first = next(model.parameters())
    if first.device.type != "cpu":
        return "it is not on the CPU"
    if first.dtype not in (torch.float32, torch.bfloat16):
        return f"its dtype is {first.dtype}"
    if config.model_type not in _TYPES:
        return f"its type '{config.model_type}' is not one of {', '.join(sorted(_TYPES))}"
    if config.hidden_act != "silu":
        return f"its activation is '{config.hidden_act}'"
    unusual = unusual_module(model, mixers)
    if unusual is not None:
        return unusual
    parts = _parts(model)
    attention = next((layer.attention for layer in parts.layers if layer.attention is not None), None)
    if attention is not None:
        if parts.rotary.rope_type not in _PLAIN_ROPE:
            return f"its rotary embedding is of type '{parts.rotary.rope_type}'"
        if attention.head_dim % 16 or attention.head_dim > 512:
            return f"its head width {attention.head_dim} is not a multiple of 16"
        if 2 * parts.rotary.inv_freq.numel() > attention.head_dim:
            return "its rotary embedding is wider than its heads"
    if config.hidden_size % 32 or (any(layer.mlp for layer in parts.layers) and config.intermediate_size % 32):
        return "its widths are not multiples of 32"
    if model.lm_head.bias is not None or any(
        getattr(layer.mlp, name).bias is not None for layer in parts.layers if layer.mlp is not None for name in _MLP
    ):
        return "its MLP or head has a bias"
    if mixers and (reason := states.misfit(mixers[0])) is not None:
        return reason
    if build.library() is None:
        return "there is no compiled decoder on this machine"
    return None


def fits_by_name(model: Any) -> bool:
    """Whether the fused decoder knows the family, so that a misfit is worth telling."""
    return model.config.model_type in _TYPES and next(model.parameters()).device.type == "cpu"


def unusual_module(model: Any, mixers: Sequence[Mixer] = ()) -> str | None:
    """Which module does something else than its weights say, and what; None if none does."""
    dtype = next(model.parameters()).dtype
    ours = [mixer.module for mixer in mixers]  # their forwards are replaced by models/ssm/adopt.py
    for name, module in model.named_modules():
        reason = None if module in ours else own_ways(module)
        if reason is not None:
            return f"'{name}' ({type(module).__name__}) {reason}"
    parts = _parts(model)
    for index, layer in enumerate(parts.layers):
        for part, name in layer.linears:
            reason = _not_plain(getattr(part, name, None), dtype)
            if reason is not None:
                return f"'{name}' of layer {index} {reason}"
        for part, names in ((layer.attention, _ATTENTION[:3]), (layer.mlp, _MLP[:2])):
            if part is not None and not _can_be_one([getattr(part, name) for name in names]):
                return f"{', '.join(names)} of layer {index} are quantised in ways that do not go together"
    reason = _not_plain(model.lm_head, dtype)
    if reason is not None:
        return f"its head {reason}"
    embedding = parts.embedding
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.weight.dtype != dtype:
        return f"its embedding is a {type(embedding).__name__} of {embedding.weight.dtype}, not a plain one of {dtype}"
    return None


def _not_plain(linear: Any, dtype: torch.dtype) -> str | None:
    if isinstance(linear, QuantisedLinear):
        return "has its columns in another order" if linear.quantised.order_K is not None else own_ways(linear)
    reason = why_not_plain(linear, dtype)
    if reason is not None:
        return reason
    if linear.weight.shape != (linear.out_features, linear.in_features):
        return f"has a weight of shape {list(linear.weight.shape)}"
    return None


def _can_be_one(linears: list[Any]) -> bool:
    """Whether the weights of linear layers can be packed as one."""
    weights = [linear.quantised for linear in linears if isinstance(linear, QuantisedLinear)]
    return not weights or (len(weights) == len(linears) and can_join(weights))


class Adoption:
    """A model whose linear layers are packed; the library's modules work over the same memory.

    Args:
        model: a causal LM for which :func:`misfit` is None.
        max_length: positions that a row may have.
        mixers: its state-space layers.
    """

    def __init__(self, model: Any, max_length: int, mixers: Sequence[Mixer] = ()) -> None:
        self._replaced: list[tuple[Any, str]] = []
        self._parts = _parts(model)
        self._tied = model.lm_head._parameters.get("weight") is self._parts.embedding.weight
        self._model = model
        library = build.library()
        assert library is not None, "misfit says whether there is a compiled decoder"
        self._library = library
        with torch.no_grad():
            self.decoder = FusedDecoder(_layout(model, self._parts, max_length, mixers), library, self._take)
            head = self.decoder.head
            self._replace(model, "lm_head", TiledLinear(head.packed, head.vocab_size, None, library))

    def undo(self) -> None:
        """Make plain modules again, with the weights that there were, bit for bit."""
        with torch.no_grad():
            for parent, name in reversed(self._replaced):
                setattr(parent, name, getattr(parent, name).unpacked().eval())
        if self._tied:
            self._model.lm_head.weight = self._parts.embedding.weight

    def _take(self, index: int, packed: PackedBlock) -> None:
        layer = self._parts.layers[index]
        attention, mlp = layer.attention, layer.mlp
        if attention is None:
            self._swap(layer.mixer, "in_proj", packed.qkv)
            self._swap(layer.mixer, "out_proj", packed.out)
        else:
            start = 0
            for name in _ATTENTION[:3]:
                each = getattr(attention, name)
                tiles = each.out_features // 16
                self._swap(attention, name, packed.qkv[start : start + tiles])
                start += tiles
            self._swap(attention, "o_proj", packed.out)
        if mlp is None:
            return
        assert packed.gate_up is not None
        assert packed.down is not None
        self._swap(mlp, "gate_proj", packed.gate_up[0::2])
        self._swap(mlp, "up_proj", packed.gate_up[1::2])
        self._swap(mlp, "down_proj", packed.down)

    def _swap(self, parent: Any, name: str, packed: Tiles) -> None:
        linear = getattr(parent, name)
        bias = None if linear.bias is None else linear.bias.detach()
        self._replace(parent, name, TiledLinear(packed, linear.out_features, bias, self._library))

    def _replace(self, parent: Any, name: str, module: nn.Module) -> None:
        setattr(parent, name, module)
        self._replaced.append((parent, name))


def _layout(model: Any, parts: _Parts, max_length: int, mixers: Sequence[Mixer]) -> Layout:
    config = model.config
    attention = next((layer.attention for layer in parts.layers if layer.attention is not None), None)
    return Layout(
        dtype=next(model.parameters()).dtype,
        width=config.hidden_size,
        # a model without attention has heads that nobody asks for
        heads=1 if attention is None else config.num_attention_heads,
        kv_heads=1 if attention is None else config.num_key_value_heads,
        head_dim=16 if attention is None else attention.head_dim,
        mlp_width=0 if parts.layers[0].mlp is None else config.intermediate_size,
        norm_eps=parts.final_norm.variance_epsilon,
        scaling=1.0 if attention is None else attention.scaling,
        num_blocks=config.num_hidden_layers,
        blocks=_blocks(model, parts, {mixer.layer: mixer for mixer in mixers}),
        rotary=_no_rotary if attention is None else _rotary_of(parts.rotary),
        max_length=max_length,
        final_norm_D=parts.final_norm.weight,
        head=_projection(model.lm_head),
        embedding_VD=parts.embedding.weight,
    )


def _blocks(model: Any, parts: _Parts, mixers: dict[int, Mixer]) -> Iterator[Block | StateBlock]:
    for index, layer in enumerate(parts.layers):
        attention, mlp = layer.attention, layer.mlp
        gate, up, down = (None if mlp is None else _projection(getattr(mlp, name)) for name in _MLP)
        mlp_norm_D = None if mlp is None else layer.mlp_norm.weight
        if attention is None:
            norm = layer.mixer.norm
            yield StateBlock(
                project=_projection(layer.mixer.in_proj),
                out=_projection(layer.mixer.out_proj),
                mixer=mixers[index],
                mixer_norm_D=layer.norm.weight,
                gain_I=norm.weight,
                norm_group=getattr(norm, "group_size", len(norm.weight)),
                norm_eps=norm.variance_epsilon,
                gate=gate,
                up=up,
                down=down,
                mlp_norm_D=mlp_norm_D,
            )
            continue
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        window = getattr(attention, "sliding_window", None) or 0
        if model.config.model_type == "mistral":
            window = getattr(model.config, "sliding_window", None) or 0
        yield Block(
            q=_projection(attention.q_proj),
            k=_projection(attention.k_proj),
            v=_projection(attention.v_proj),
            out=_projection(attention.o_proj),
            attention_norm_D=layer.norm.weight,
            q_norm_d=None if q_norm is None else q_norm.weight,
            k_norm_d=None if k_norm is None else k_norm.weight,
            window=window,
            gate=gate,
            up=up,
            down=down,
            mlp_norm_D=mlp_norm_D,
        )


def _projection(linear: nn.Linear | QuantisedLinear) -> Projection:
    return Projection(linear.quantised if isinstance(linear, QuantisedLinear) else linear.weight, linear.bias)


def _rotary_of(rotary: Any) -> Any:
    def at(positions_N: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(torch.zeros(1, 1, dtype=torch.float32), positions_N[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]

    return at


def _no_rotary(positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of no width, for a model without attention."""
    empty_N0 = torch.empty(len(positions_N), 0)
    return empty_N0, empty_N0
