"""Which models of transformers the native decoder fits, and how one of them is taken over and given back.

A module is not its weight: an adapter, a quantiser or a hook may compute something else around it. So only plain
modules are taken, and after packing the whole model is compared with the library's results before (trial.py).
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.phases import PHASES
from foretoken.forward.plain import own_ways, why_not_plain
from foretoken.forward.quantised_experts import QuantisedExperts, in_halves
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight
from foretoken.forward.ssm.layout import Mixer, is_short
from foretoken.forward.stored_embedding import StoredEmbedding, dtype_of, is_plain_embedding
from foretoken.forward.stored_weight import RoundedWeight
from foretoken.models.adoption.families import FAMILIES
from foretoken.models.adoption.parts import ROUTERS, Layer, Parts, parts_of
from foretoken.native import build, mapped, states
from foretoken.native.decoder import NativeDecoder
from foretoken.native.dense_weights import can_round, find_parameters
from foretoken.native.layout import Block, Experts, Layout, MLPBlock, PackedBlock, Projection, StateBlock
from foretoken.native.packing import TiledLinear, TiledPair, Tiles
from foretoken.native.quantised import can_join, joined
from foretoken.native.superblocks import MixedTiles
from foretoken.native.tiled_experts import TiledExperts

# tables that do not depend on the sequence at hand; longrope's do so beyond the positions that are served
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "yarn", "longrope", "ntk_alpha"})

_PROJECTED = ("project_in", "project_out")  # of OPT's smallest but one
_SILENCE = 1.0  # seconds of packing before a line says how far it is


def misfit(model: Any, mixers: Sequence[Mixer] = ()) -> str | None:
    """Why the native decoder cannot run this model; None if it can."""
    reason = odd_anatomy(model, mixers)
    if reason is None and build.library() is None:
        return "there is no compiled decoder on this machine"
    return reason


def odd_anatomy(model: Any, mixers: Sequence[Mixer] = ()) -> str | None:
    """The part of a model that no compiled decoder computes; None if there is none. Weights are not read."""
    config = model.config
    first = next(model.parameters())
    if first.device.type != "cpu":
        return "it is not on the CPU"
    if first.dtype not in (torch.float32, torch.bfloat16):
        return f"its dtype is {str(first.dtype).removeprefix('torch.')}: use bfloat16, which is as small, or float32"
    if config.model_type not in FAMILIES:
        return f"its type '{config.model_type}' is not one of {', '.join(sorted(FAMILIES))}"
    unusual = unusual_module(model, mixers)
    if unusual is not None:
        return unusual
    parts = parts_of(model)
    activations = {layer.activation for layer in parts.layers if layer.mlp is not None or layer.experts is not None}
    if None in activations or len(activations) > 1:
        names = (getattr(config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function"))
        return f"its activation is '{next(filter(None, names), None)}'"
    if parts.final_norm is None or any(getattr(parts.body, name, None) is not None for name in _PROJECTED):
        return "it has no norm before its head, or projects embeddings"
    reason = _odd_heads(parts)
    if reason is not None:
        return reason
    if config.hidden_size % 32 or any(width % 32 for width in _mlp_widths(parts)):
        return "its widths are not multiples of 32"
    return states.misfit(mixers[0]) if mixers else None


def _odd_heads(parts: Parts) -> str | None:
    """The feature of a model's attention that native code lacks; None if there is none."""
    attention = parts.attention
    if attention is None:
        return None
    for kind, how in parts.rotary_kinds.items():
        if how not in _PLAIN_ROPE:
            return f"its rotary embedding is of type '{how}'"
        if 2 * parts.rotary(kind, 1)(torch.zeros(1, dtype=torch.int64))[0].shape[1] > _head_dim(attention):
            return "its rotary embedding is wider than its heads"
    if getattr(attention.config, "clip_qkv", None) is not None:
        return "its queries, keys and values are clipped"
    width = _head_dim(attention)
    if width % 16 or width > 512:
        return f"its head width {width} is not a multiple of 16"
    names = ("q_norm", "q_layernorm", "query_layernorm", "k_norm", "k_layernorm", "key_layernorm")
    norms = (getattr(attention, name, None) for name in names)
    if any(getattr(norm, "bias", None) is not None for norm in norms):
        return "norms of its queries and keys add something"
    return None


def _head_dim(attention: Any) -> int:
    return int(attention.head_size if hasattr(attention, "head_size") else attention.head_dim)


def has_experts(model: Any) -> bool:
    """Whether rows of a model for which :func:`misfit` is None choose their way through it."""
    return any(layer.experts is not None for layer in parts_of(model).layers)


def fits_by_name(model: Any) -> bool:
    """Whether the native decoder knows the family, so that a misfit is worth telling."""
    return model.config.model_type in FAMILIES and next(model.parameters()).device.type == "cpu"


def unusual_module(model: Any, mixers: Sequence[Mixer] = ()) -> str | None:
    """The module that computes something else than its weights define, and how; None if none does."""
    dtype = next(model.parameters()).dtype
    ours = [mixer.module for mixer in mixers]  # their forwards are replaced by forward/ssm/adopt.py
    for name, module in model.named_modules():
        reason = None if module in ours else own_ways(module)
        if reason is not None:
            return f"'{name}' ({type(module).__name__}) {reason}"
    parts = parts_of(model)
    for index, layer in enumerate(parts.layers):
        for part, name in layer.linears:
            reason = _not_plain(getattr(part, name, None), dtype)
            if reason is not None:
                return f"'{name}' of layer {index} {reason}"
        into, steps, _ = layer.mixing
        sets = (
            (layer.attention, layer.heads, False),
            (layer.mlp, layer.way.into, True),
            (layer.mixer, into, False),
            (layer.mixer, steps, True),
        )
        for part, names, one in sets:
            if part is not None and not _go_together([getattr(part, name) for name in names], one=one):
                return f"{', '.join(names)} of layer {index} are quantised in ways that do not go together"
        if layer.mixer is not None and _quantised(layer.mixer, steps) and not _quantised(layer.mixer, into):
            return f"{', '.join(steps)} of layer {index} are quantised, and {', '.join(into)} are not"
        if layer.experts is not None and (reason := _odd_experts(layer, dtype)) is not None:
            return f"the experts of layer {index} {reason}"
    reason = _not_plain(model.lm_head, dtype)
    if reason is not None:
        return f"its head {reason}"
    embedding = parts.embedding
    if not is_plain_embedding(embedding) or dtype_of(embedding) != dtype:
        return f"its embedding is a {type(embedding).__name__} of {dtype_of(embedding)}, not a plain one of {dtype}"
    return None


def _not_plain(linear: Any, dtype: torch.dtype) -> str | None:
    if isinstance(linear, QuantisedLinear):
        return own_ways(linear)
    reason = why_not_plain(linear, dtype)
    if reason is not None:
        return reason
    if linear.weight.shape != (linear.out_features, linear.in_features):
        return f"has a weight of shape {list(linear.weight.shape)}"
    return None


def _odd_experts(layer: Layer, dtype: torch.dtype) -> str | None:
    """The feature of a layer's experts that native code lacks; None if there is none."""
    experts, router = layer.experts, layer.router
    if getattr(router, "num_group", 1) > 1:
        return "are chosen by groups"
    turned = layer.activation == "clamped_swiglu"
    quantised = isinstance(experts, QuantisedExperts)
    given = [] if quantised else [(experts, "gate_up_proj"), (experts, "down_proj")]
    given.append((layer.scoring, "weight"))
    for module in (experts, router):
        others = {name for name, _ in module.named_parameters()} - {name for part, name in given if part is module}
        others -= {"moe_statics.e_score_correction_bias", *(f"{name}.weight" for name in ROUTERS)}
        if turned:
            others -= {"bias", "gate_up_proj_bias", "down_proj_bias"}
        if others:
            return f"have '{min(others)}' next to their weights"
    weights: list[Any] = [getattr(module, name, None) for module, name in given]
    for weight, (_, name) in zip(weights, given, strict=True):
        if type(weight) is not nn.Parameter or weight.dtype != dtype or weight.device.type != "cpu":
            return f"have no plain '{name}' of {dtype}"
    count, width = weights[-1].shape
    if quantised:
        return f"are {experts.channels} wide, no multiple of 32" if experts.channels % 32 else None
    gate_up_EFD, down_EDF, _ = weights
    if turned:
        gate_up_EFD, down_EDF = gate_up_EFD.mT, down_EDF.mT
    channels = down_EDF.shape[-1]
    if gate_up_EFD.shape != (count, 2 * channels, width) or down_EDF.shape != (count, width, channels):
        return f"are laid out as {list(gate_up_EFD.shape)} and {list(down_EDF.shape)}"
    return f"are {channels} wide, no multiple of 32" if channels % 32 else None


def _go_together(linears: list[Any], *, one: bool) -> bool:
    """Whether linear layers can be packed together; ``one``: in one form."""
    weights = [linear.quantised for linear in linears if isinstance(linear, QuantisedLinear)]
    return not weights or (len(weights) == len(linears) and (not one or can_join(weights)))


def _quantised(part: Any, names: Sequence[str]) -> bool:
    return any(isinstance(getattr(part, name), QuantisedLinear) for name in names)


class Adoption:
    """A model with packed linear layers; the library's modules use the same memory.

    Args:
        model: a causal LM for which :func:`misfit` is None.
        max_length: positions that a row may have.
        mixers: its state-space layers.
    """

    def __init__(self, model: Any, max_length: int, mixers: Sequence[Mixer] = ()) -> None:
        self._replaced: list[tuple[Any, str]] = []
        self._told = time.monotonic()
        self._parts = parts_of(model)
        tied = model.lm_head._parameters.get("weight")
        self._tied = tied is not None and tied is self._parts.embedding._parameters.get("weight")
        self._model = model
        library = build.library()
        assert library is not None, "misfit says whether there is a compiled decoder"
        self._library = library
        with torch.no_grad():
            self.decoder = NativeDecoder(_layout(model, self._parts, max_length, mixers), library, self._take)
            self._replace(model, "lm_head", self._linear(model.lm_head, self.decoder.head.packed))

    def undo(self) -> None:
        """Make plain modules again, with the weights that there were, bit for bit."""
        with torch.no_grad():
            for parent, name in reversed(self._replaced):
                setattr(parent, name, getattr(parent, name).unpacked().eval())
        if self._tied:
            self._model.lm_head.weight = self._parts.embedding.weight

    def _take(self, index: int, packed: PackedBlock) -> None:
        if time.monotonic() > self._told + _SILENCE:
            self._told = time.monotonic()
            PHASES.info("packing weights: layer %d of %d", index + 1, len(self._parts.layers))
        layer = self._parts.layers[index]
        mlp = layer.mlp
        if packed.qkv is not None and packed.out is not None:
            self._take_look_back(layer, packed.qkv, packed.out)
        if packed.mixer is not None:
            self._take_mixer(layer, *packed.mixer)
        if packed.experts is not None:
            family = self._parts.family
            block = getattr(getattr(self._parts.body, family.layers)[index], family.mlp)
            self._replace(block, "experts", TiledExperts(layer.experts, *packed.experts, self._library))
        if mlp is None or packed.gate_up is None or packed.down is None:
            return
        into, gated = layer.way.into, layer.way.gated
        factors = (packed.gate_up[0::2], packed.gate_up[1::2]) if gated else (packed.gate_up,)
        if gated and len(into) == 1:
            linear = getattr(mlp, into[0])
            biases = [None, None] if linear.bias is None else linear.bias.detach().chunk(2)
            halves = (
                TiledLinear(each, linear.out_features // 2, bias, self._library)
                for each, bias in zip(factors, biases, strict=True)
            )
            self._replace(mlp, into[0], TiledPair(*halves))
        else:
            for name, each in zip(into, factors, strict=True):
                self._swap(mlp, name, each)
        self._swap(mlp, layer.way.out, packed.down)

    def _take_look_back(self, layer: Layer, qkv: Tiles | MixedTiles, out: Tiles) -> None:
        attention = layer.attention
        if attention is None:
            self._take_mixer(layer, qkv, out)
            return
        self._take_in_turn(layer, attention, layer.heads, qkv)
        self._swap(attention, layer.out, out)

    def _take_mixer(self, layer: Layer, project: Tiles | MixedTiles, out: Tiles) -> None:
        """Projections to steps alone, a few rows, stay as they are: they need not be whole tiles."""
        into, _, end = layer.mixing
        self._take_in_turn(layer, layer.mixer, into, project)
        self._swap(layer.mixer, end, out)

    def _take_in_turn(self, layer: Layer, part: Any, names: Sequence[str], packed: Tiles | MixedTiles) -> None:
        start = 0
        for name in names:
            each = getattr(part, name)
            tiles = -(-each.out_features // 16)
            self._replace(part, name, self._linear(each, packed[start : start + tiles], order_of(layer, each)))
            start += tiles

    def _linear(self, linear: Any, packed: Tiles, order_O: Tensor | None = None) -> TiledLinear:
        bias = None if linear.bias is None else linear.bias.detach()
        return TiledLinear(packed, linear.out_features, bias, self._library, order_O)

    def _swap(self, parent: Any, name: str, packed: Tiles) -> None:
        self._replace(parent, name, self._linear(getattr(parent, name), packed))

    def _replace(self, parent: Any, name: str, module: nn.Module) -> None:
        _leave(getattr(parent, name))
        setattr(parent, name, module)
        self._replaced.append((parent, name))


def _layout(model: Any, parts: Parts, max_length: int, mixers: Sequence[Mixer]) -> Layout:
    config, attention, norm = model.config, parts.attention, parts.final_norm
    final_norm_D = parts.gain(norm)
    assert final_norm_D is not None
    kinds = list(parts.rotary_kinds)
    capped = parts.family.caps_scores
    return Layout(
        dtype=next(model.parameters()).dtype,
        width=config.hidden_size,
        # a model without attention has unused heads
        heads=1 if attention is None else config.num_attention_heads,
        kv_heads=1 if attention is None else _kv_heads(parts, config),
        head_dim=16 if attention is None else _head_dim(attention),
        mlp_width=max(_mlp_widths(parts), default=0),
        norm_eps=next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-5),
        scaling=1.0 if attention is None else attention.scaling,
        num_blocks=config.num_hidden_layers,
        blocks=_blocks(model, parts, {mixer.layer: mixer for mixer in mixers}),
        rotary=tuple(parts.rotary(kind, max_length) for kind in kinds) or _no_rotary,
        max_length=max_length,
        final_norm_D=final_norm_D,
        head=_projection(model.lm_head),
        embedding_VD=parts.embedding.stored if isinstance(parts.embedding, StoredEmbedding) else parts.embedding.weight,
        activation=next((layer.activation for layer in parts.layers if layer.activation is not None), "silu"),
        interleaved=parts.family.interleaved,
        score_cap=(capped and config.attn_logit_softcapping) or 0.0,
        embedding_scale=parts.embedding_scale,
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logit_scale=_logit_scale(config),
        logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
        centred=parts.family.centred,
        final_shift_D=parts.shift(norm),
        position_embedding_ND=None if parts.position_embedding is None else parts.position_embedding[:max_length],
    )


def _logit_scale(config: Any) -> float:
    found = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier", "logits_scaling")]
    return float(found[0] * found[1] / found[2])


def _blocks(model: Any, parts: Parts, mixers: dict[int, Mixer]) -> Iterator[Block | StateBlock | MLPBlock]:
    config, kinds = model.config, list(parts.rotary_kinds)
    for index, layer in enumerate(parts.layers):
        attention = layer.attention
        factors = parts.factors(index)
        gate, up, down = _mlp(layer)
        if gate is not None and up is not None and down is not None:
            gate, up, down = _times(gate, factors.gate), _times(up, factors.mlp_out), _added(down, factors.mlp_out)
        norm_D, end_norm_D, mlp_norm_D, mlp_end_norm_D = (parts.gain(each) for each in layer.norms)
        experts = None if layer.experts is None else _experts(layer)
        if attention is None and layer.mixer is None:
            assert up is not None
            assert down is not None
            assert mlp_norm_D is not None
            yield MLPBlock(up=up, down=down, gate=gate, mlp_norm_D=mlp_norm_D)
            continue
        mixing = None
        if layer.mixer is not None:
            assert norm_D is not None
            mixing = _state_block(mixers[index], layer, norm_D, factors.mixer_out)
        if attention is None:
            assert mixing is not None
            yield replace(mixing, gate=gate, up=up, down=down, mlp_norm_D=mlp_norm_D, experts=experts)
            continue
        q, *opening, k, v = (_times(each, factors.attention_in, bias=1.0) for each in _heads(layer, config))
        window = getattr(config if parts.family.one_window else attention, "sliding_window", None)
        everywhere = window is None and hasattr(attention, "is_sliding")  # EXAONE without windows
        if not getattr(attention, "is_sliding", True):
            window = None
        rotated = getattr(attention, "use_rope", bool(window) or everywhere or not parts.family.rotates_windows)
        yield Block(
            q=q,
            k=_times(k, factors.key),
            v=v,
            out=_times(_projection(getattr(attention, layer.out)), factors.attention_out),
            attention_norm_D=norm_D,
            opening=opening[0] if opening else None,
            attention_end_norm_D=end_norm_D,
            q_norm_d=parts.head_gain(attention, "q"),
            k_norm_d=parts.head_gain(attention, "k"),
            window=window or 0,
            rotary=kinds.index(parts.rotary_of(attention)) if kinds and rotated else None,
            gate=gate,
            up=up,
            down=down,
            mlp_norm_D=mlp_norm_D,
            mlp_end_norm_D=mlp_end_norm_D,
            experts=experts,
            attention_shift_D=parts.shift(layer.norm),
            mlp_shift_D=parts.shift(layer.mlp_norm),
            parallel=parts.parallel,
            parallel_mixer=mixing,
            norm_last=hasattr(attention, "query_layernorm"),
            sinks_H=getattr(attention, "sinks", None),
        )


def _state_block(mixer: Mixer, layer: Layer, norm_D: Tensor, factor: float) -> StateBlock:
    """The block of a mixer without an MLP; the factor multiplies its output."""
    module: Any = mixer.module
    into, steps, end = layer.mixing
    project, last = ([_ordered(layer, getattr(module, name)) for name in names] for names in (into, steps))
    if last:
        project.append(_below(last))
    out, inner = _projection(getattr(module, end)), mixer.heads * mixer.head_width
    if mixer.short:
        return StateBlock(tuple(project), out, mixer, norm_D, torch.ones(inner), norm_group=0, norm_eps=1.0)
    norm = module.o_norm if hasattr(module, "o_norm") else module.norm  # OLMo's
    if mixer.delta:
        gain_I, width = norm.weight.float().repeat(mixer.heads), mixer.head_width
        return StateBlock(tuple(project), out, mixer, norm_D, gain_I, width, norm.variance_epsilon, norm_first=True)
    if hasattr(module, "mup_vector"):
        project = [_times(_times(project[0], module.ssm_in_multiplier, bias=1.0), module.mup_vector.flatten())]
    normed = not isinstance(norm, nn.Identity)
    group = getattr(norm, "group_size", inner // getattr(norm, "n_groups", 1))
    return StateBlock(
        project=tuple(project),
        out=_added(out, factor),
        mixer=mixer,
        mixer_norm_D=norm_D,
        gain_I=(norm.weight.float() if normed else torch.ones(inner)) * factor,
        norm_group=group if normed else 0,
        norm_eps=norm.variance_epsilon if normed else 1.0,
        norm_first=normed and getattr(norm, "norm_before_gate", False),
    )


def _times(of: Projection, factor: Tensor | float, *, bias: Tensor | float | None = None) -> Projection:
    """A projection times a factor; if the bias has another factor, only the product with the weight."""
    if not isinstance(factor, Tensor) and factor == 1:
        return of
    biases = None if of.bias_O is None else of.bias_O.float() * (factor if bias is None else bias)
    return Projection(of.weight_OK, biases, of.scale * factor)


def _added(of: Projection, factor: float) -> Projection:
    """A projection of inputs that have been multiplied by a factor already: so is its bias."""
    return of if of.bias_O is None or factor == 1 else of._replace(bias_O=of.bias_O.float() * factor)


def _experts(layer: Layer) -> Experts:
    """Those of a layer; their weights are stacked, the gate's above the other factor's."""
    experts, biases = layer.experts, getattr(layer.experts, "biases", None)
    weights: tuple[Tensor | QuantisedWeight, ...]
    if isinstance(experts, QuantisedExperts):
        library = build.library()
        for each in itertools.chain.from_iterable(experts.weights):
            if isinstance(each, RoundedWeight) and can_round(each) and library is not None:
                find_parameters(each, library)
        gates, ups = zip(*(each.split([experts.channels] * 2) for each, _ in experts.weights), strict=True)
        weights = joined(gates), joined(ups), joined([down for _, down in experts.weights])
    else:
        both, down = experts.gate_up_proj, experts.down_proj
        if layer.activation == "clamped_swiglu":
            both, down = in_halves(both, down)
            turned = experts.gate_up_proj_bias
            biases = torch.cat([turned[:, ::2], turned[:, 1::2]], dim=1), experts.down_proj_bias
        gate_EFD, up_EFD = both.chunk(2, dim=1)
        weights = gate_EFD.flatten(0, 1), up_EFD.flatten(0, 1), down.flatten(0, 1)
    biases_of: tuple[Tensor | None, ...] = (None, None, None)
    if biases is not None:
        biases_of = *(each.flatten() for each in biases[0].chunk(2, dim=1)), biases[1].flatten()
    gate, up, down = map(Projection, weights, biases_of)
    return Experts(
        router_ED=layer.scoring.weight,
        gate=gate,
        up=up,
        down=down,
        chosen=layer.router.top_k,
        normed=getattr(layer.router, "norm_topk_prob", True),
        opening_D=None if layer.opening is None else layer.opening.weight[0],
        router_bias_E=getattr(layer.router, "bias", None),
        # Ernie's are softmaxed, LFM2's are not even where nothing corrects them
        sigmoid=(layer.correction is not None and not hasattr(layer.router, "moe_statics"))
        or hasattr(layer.router, "use_expert_bias"),
        correction_E=None if layer.correction is None else layer.correction.flatten(),
        factor=float(getattr(layer.router, "routed_scaling_factor", getattr(layer.router, "route_scale", 1.0))),
    )


def _kv_heads(parts: Parts, config: Any) -> int:
    by_head = any(layer.attention is not None and layer.by_head for layer in parts.layers)
    return int(
        config.num_attention_heads if by_head else getattr(config, "num_key_value_heads", config.num_attention_heads)
    )


def _mlp_widths(parts: Parts) -> set[int]:
    """Inner widths of the MLPs."""
    return {int(getattr(layer.mlp, layer.way.out).in_features) for layer in parts.layers if layer.mlp is not None}


def _heads(layer: Layer, config: Any) -> list[Projection]:
    """Projections to queries, perhaps gates, keys and values."""
    linears = [getattr(layer.attention, name) for name in layer.heads]
    found = [_ordered(layer, each) for each in linears]
    if layer.opens:
        found[:1] = _split(found[0], [found[0].outputs // 2] * 2)
    if len(found) > 1:
        return found
    if layer.by_head:
        return _split(found[0], [found[0].outputs // 3] * 3)
    keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return _split(found[0], [each * layer.attention.head_dim for each in (config.num_attention_heads, keys, keys)])


def order_of(layer: Layer, linear: Any) -> Tensor | None:
    """Which of its outputs native code has first, second, ...; None where they stand so.

    Of attention all queries (all gates), all keys, all values. Of a short convolution the gate, and the factor before
    the convolution and the other. Of a delta net by groups all z, q, k and v, or all a and b.
    """
    outputs_O, mixer = torch.arange(linear.out_features), layer.mixer
    if layer.by_head or (layer.opens and linear is layer.attention.q_proj):
        kinds = 3 if layer.by_head else 2
        return outputs_O.view(-1, kinds, _head_dim(layer.attention)).transpose(0, 1).flatten()
    if mixer is None or linear is getattr(mixer, "out_proj", None):
        return None
    if is_short(mixer):
        before, gate, x = outputs_O.chunk(3)
        return torch.cat([gate, before, x])
    if not hasattr(mixer, "in_proj_qkvz"):
        return None
    key, values = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads
    sizes = [values] * 2 if linear is mixer.in_proj_ba else [key, key, *[values * mixer.head_v_dim] * 2]
    *others, last = outputs_O.view(mixer.num_k_heads, -1).split(sizes, dim=1)
    return torch.cat([each.flatten() for each in (last, *others)])


def _ordered(layer: Layer, linear: Any) -> Projection:
    """The outputs of a layer's linear module in the order that native code has."""
    whole, order_O = _projection(linear), order_of(layer, linear)
    return whole if order_O is None else _rows(whole, order_O)


def _below(parts: Sequence[Projection]) -> Projection:
    """Projections of the same inputs without biases, one below the other."""
    weights = [each.weight_OK for each in parts]
    quantised = [each for each in weights if isinstance(each, QuantisedWeight)]
    return Projection(
        joined(quantised) if quantised else torch.cat([each for each in weights if isinstance(each, Tensor)])
    )


def _rows(whole: Projection, order_O: Tensor) -> Projection:
    """The same outputs in another order."""
    weight, bias, _ = whole
    taken = weight.rows(order_O) if isinstance(weight, QuantisedWeight) else weight[order_O]
    return Projection(taken, None if bias is None else bias[order_O])


def _mlp(layer: Layer) -> list[Projection | None]:
    """Projections to the gate and the other factor, and from their product."""
    if layer.mlp is None:
        return [None, None, None]
    into, out, gated = layer.way
    found: list[Projection | None] = [_projection(getattr(layer.mlp, name)) for name in into]
    if not gated:
        found = [None, *found]
    elif len(found) == 1:
        whole = _projection(getattr(layer.mlp, into[0]))
        found = [*_split(whole, [whole.outputs // 2] * 2)]
    return [*found, _projection(getattr(layer.mlp, out))]


def _projection(linear: nn.Linear | QuantisedLinear) -> Projection:
    return Projection(linear.quantised if isinstance(linear, QuantisedLinear) else linear.weight, linear.bias)


def _split(whole: Projection, outputs: Sequence[int]) -> list[Projection]:
    """A projection in parts of so many outputs."""
    weight, bias, _ = whole
    biases = [None] * len(outputs) if bias is None else bias.split(list(outputs))
    if isinstance(weight, QuantisedWeight):
        weights: Sequence[Tensor | QuantisedWeight] = weight.split(outputs)
    else:
        weights = weight.split(list(outputs))
    return [Projection(*each) for each in zip(weights, biases, strict=True)]


def _leave(linear: Any) -> None:
    """Let the file's pages of a packed layer leave memory."""
    if isinstance(linear, QuantisedLinear):
        source = linear.quantised.source
    else:
        source = linear.weight if type(linear) is nn.Linear else None
    if source is not None:
        mapped.leave(source)


def _no_rotary(positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of no width, for a model without attention."""
    empty_N0 = torch.empty(len(positions_N), 0)
    return empty_N0, empty_N0
