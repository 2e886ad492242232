"""Which models of transformers the fused decoder fits, and how one of them is taken over and given back.

A module is not its weight: an adapter, a quantiser or a hook may compute something else around it. So only plain
modules are taken, and after packing the whole model is tried against what the library computed before (trial.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.fused import build
from foretoken.models.fused.decoder import FusedDecoder
from foretoken.models.fused.layout import Block, Layout, PackedBlock, Projection
from foretoken.models.fused.packing import TiledLinear
from foretoken.models.plain import own_ways, why_not_plain

_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the sequence at hand
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def misfit(model: Any) -> str | None:
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
    unusual = unusual_module(model)
    if unusual is not None:
        return unusual
    attention = model.model.layers[0].self_attn
    rotary = model.model.rotary_emb
    if rotary.rope_type not in _PLAIN_ROPE:
        return f"its rotary embedding is of type '{rotary.rope_type}'"
    if attention.head_dim % 16 or attention.head_dim > 512:
        return f"its head width {attention.head_dim} is not a multiple of 16"
    if 2 * rotary.inv_freq.numel() > attention.head_dim:
        return "its rotary embedding is wider than its heads"
    if config.hidden_size % 32 or config.intermediate_size % 32:
        return "its widths are not multiples of 32"
    if model.lm_head.bias is not None or any(layer.mlp.gate_proj.bias is not None for layer in model.model.layers):
        return "its MLP or head has a bias"
    if build.library() is None:
        return "there is no compiled decoder on this machine"
    return None


def fits_by_name(model: Any) -> bool:
    """Whether the fused decoder knows the family, so that a misfit is worth telling."""
    return model.config.model_type in _TYPES and next(model.parameters()).device.type == "cpu"


def unusual_module(model: Any) -> str | None:
    """Which module does something else than its weights say, and what; None if none does."""
    dtype = next(model.parameters()).dtype
    for name, module in model.named_modules():
        reason = own_ways(module)
        if reason is not None:
            return f"'{name}' ({type(module).__name__}) {reason}"
    for index, layer in enumerate(model.model.layers):
        for part, names in ((layer.self_attn, _ATTENTION), (layer.mlp, _MLP)):
            for name in names:
                reason = _not_plain(getattr(part, name, None), dtype)
                if reason is not None:
                    return f"'{name}' of layer {index} {reason}"
    reason = _not_plain(model.lm_head, dtype)
    if reason is not None:
        return f"its head {reason}"
    embedding = model.model.embed_tokens
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.weight.dtype != dtype:
        return f"its embedding is a {type(embedding).__name__} of {embedding.weight.dtype}, not a plain one of {dtype}"
    return None


def _not_plain(linear: Any, dtype: torch.dtype) -> str | None:
    reason = why_not_plain(linear, dtype)
    if reason is not None:
        return reason
    if linear.weight.shape != (linear.out_features, linear.in_features):
        return f"has a weight of shape {list(linear.weight.shape)}"
    return None


class Adoption:
    """A model whose linear layers are packed; the library's modules work over the same memory.

    Args:
        model: a causal LM for which :func:`misfit` is None.
        max_length: positions that a row may have.
    """

    def __init__(self, model: Any, max_length: int) -> None:
        self._replaced: list[tuple[Any, str]] = []
        self._tied = model.lm_head.weight is model.model.embed_tokens.weight
        self._model = model
        library = build.library()
        assert library is not None, "misfit says whether there is a compiled decoder"
        self._library = library
        with torch.no_grad():
            self.decoder = FusedDecoder(_layout(model, max_length), library, self._take)
            head = self.decoder.head
            self._replace(model, "lm_head", TiledLinear(head.packed, head.vocab_size, None, library))

    def undo(self) -> None:
        """Make plain modules again, with the weights that there were, bit for bit."""
        with torch.no_grad():
            for parent, name in reversed(self._replaced):
                packed = getattr(parent, name)
                plain = nn.Linear(packed.in_features, packed.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(packed.weight, requires_grad=False)
                if packed.own_bias is not None:
                    plain.bias = nn.Parameter(packed.own_bias, requires_grad=False)
                setattr(parent, name, plain.eval())
        if self._tied:
            self._model.lm_head.weight = self._model.model.embed_tokens.weight

    def _take(self, index: int, packed: PackedBlock) -> None:
        layer = self._model.model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        start = 0
        for name in _ATTENTION[:3]:
            each = getattr(attention, name)
            tiles = each.out_features // 16
            self._swap(attention, name, packed.qkv[start : start + tiles])
            start += tiles
        assert packed.gate_up is not None
        assert packed.down is not None
        self._swap(attention, "o_proj", packed.out)
        self._swap(mlp, "gate_proj", packed.gate_up[0::2])
        self._swap(mlp, "up_proj", packed.gate_up[1::2])
        self._swap(mlp, "down_proj", packed.down)

    def _swap(self, parent: Any, name: str, packed: Tensor) -> None:
        linear = getattr(parent, name)
        bias = None if linear.bias is None else linear.bias.detach()
        self._replace(parent, name, TiledLinear(packed, linear.out_features, bias, self._library))

    def _replace(self, parent: Any, name: str, module: nn.Module) -> None:
        setattr(parent, name, module)
        self._replaced.append((parent, name))


def _layout(model: Any, max_length: int) -> Layout:
    config, body = model.config, model.model
    attention = body.layers[0].self_attn
    return Layout(
        dtype=next(model.parameters()).dtype,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        mlp_width=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        scaling=attention.scaling,
        num_blocks=config.num_hidden_layers,
        blocks=_blocks(model),
        rotary=_rotary_of(body.rotary_emb),
        max_length=max_length,
        final_norm_D=body.norm.weight,
        head=Projection(model.lm_head.weight),
        embedding_VD=body.embed_tokens.weight,
    )


def _blocks(model: Any) -> Iterator[Block]:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        window = getattr(attention, "sliding_window", None) or 0
        if model.config.model_type == "mistral":
            window = getattr(model.config, "sliding_window", None) or 0
        yield Block(
            q=_projection(attention.q_proj),
            k=_projection(attention.k_proj),
            v=_projection(attention.v_proj),
            out=_projection(attention.o_proj),
            attention_norm_D=layer.input_layernorm.weight,
            q_norm_d=None if q_norm is None else q_norm.weight,
            k_norm_d=None if k_norm is None else k_norm.weight,
            window=window,
            gate=_projection(mlp.gate_proj),
            up=_projection(mlp.up_proj),
            down=_projection(mlp.down_proj),
            mlp_norm_D=layer.post_attention_layernorm.weight,
        )


def _projection(linear: nn.Linear) -> Projection:
    return Projection(linear.weight, linear.bias)


def _rotary_of(rotary: Any) -> Any:
    def at(positions_N: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(torch.zeros(1, 1, dtype=torch.float32), positions_N[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]

    return at
