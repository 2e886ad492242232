"""Which models of transformers the native decoder fits, and how one of them is taken over and given back.

A module is not its weight: an adapter, a quantiser or a hook may compute something else around it. So only plain
modules are taken, and after packing the whole model is compared with the library's results before (trial.py).
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.phases import PHASES
from foretoken.forward.plain import own_ways, why_not_plain
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.forward.ssm.layout import Mixer
from foretoken.forward.stored_embedding import dtype_of, is_plain_embedding
from foretoken.models.adoption.description import layout_of, order_of
from foretoken.models.adoption.families import FAMILIES
from foretoken.models.adoption.parts import ROUTERS, Layer, Parts, head_dim_of, parts_of
from foretoken.native import build, mapped, states
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import PackedBlock
from foretoken.native.packing import TiledLinear, TiledPair, Tiles
from foretoken.native.quantised import can_join
from foretoken.native.superblocks import MixedTiles
from foretoken.native.tiled_experts import TiledExperts

# tables that do not depend on the sequence at hand; longrope's do so beyond the positions that are served
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "yarn", "longrope", "ntk_alpha", "proportional"})

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
    if getattr(config, "enable_moe_block", False):
        return "its experts stand next to an MLP, each with norms of its own"
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
    widths = config.hidden_size, *parts.mlp_widths, getattr(config, "hidden_size_per_layer_input", None) or 0
    if any(width % 32 for width in widths):
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
        served = [each for each in parts.attentions if parts.rotary_of(each) == kind]
        rotated = 2 * parts.rotary(kind, 1)(torch.zeros(1, dtype=torch.int64))[0].shape[1]
        if rotated > min(map(head_dim_of, served), default=rotated):
            return "its rotary embedding is wider than its heads"
    if getattr(attention.config, "clip_qkv", None) is not None:
        return "its queries, keys and values are clipped"
    for width in map(head_dim_of, parts.attentions):
        if width % 16 or width > 512:
            return f"its head width {width} is not a multiple of 16"
    latent = [getattr(attention, name, 32) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    ranks = [getattr(attention, name, None) or 32 for name in ("q_lora_rank", "kv_lora_rank")]
    if any(each % 16 for each in latent) or any(each % 32 for each in ranks):
        return f"its compressed heads are {latent} wide, no multiples of 16, or their ranks {ranks} no multiples of 32"
    names = ("q_norm", "q_layernorm", "query_layernorm", "k_norm", "k_layernorm", "key_layernorm")
    norms = (getattr(attention, name, None) for name in names)
    if any(getattr(norm, "bias", None) is not None for norm in norms):
        return "norms of its queries and keys add something"
    return None


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
    for embedding in (parts.embedding, getattr(parts.body, "embed_tokens_per_layer", parts.embedding)):
        if not is_plain_embedding(embedding) or dtype_of(embedding) != dtype:
            return f"its embedding is a {type(embedding).__name__} of {dtype_of(embedding)}, not a plain one of {dtype}"
    return _not_plain(parts.body.per_layer_model_projection, dtype) if parts.has_inputs else None


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
    turned = layer.activation == "clamped_swiglu"
    quantised = isinstance(experts, QuantisedExperts)
    gated = not hasattr(experts, "up_proj")  # Nemotron-H's are not
    if not isinstance(getattr(layer.block, "fc1_latent_proj", nn.Identity()), nn.Identity):
        return "read compressed rows"
    given = [] if quantised else [(experts, "gate_up_proj" if gated else "up_proj"), (experts, "down_proj")]
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
    if gate_up_EFD.shape != (count, (1 + gated) * channels, width) or down_EDF.shape != (count, width, channels):
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
        for layer in self._latent_layers:
            layer.attention.wide_values = True  # as native code keeps them, see forward/attention.py
        with torch.no_grad():
            self.decoder = NativeDecoder(layout_of(model, self._parts, max_length, mixers), library, self._take)
            self._replace(model, "lm_head", self._linear(model.lm_head, self.decoder.head.packed))

    def undo(self) -> None:
        """Make plain modules again, with the weights that there were, bit for bit."""
        for layer in self._latent_layers:
            del layer.attention.wide_values
        with torch.no_grad():
            for parent, name in reversed(self._replaced):
                setattr(parent, name, getattr(parent, name).unpacked().eval())
        if self._tied:
            self._model.lm_head.weight = self._parts.embedding.weight

    @property
    def _latent_layers(self) -> list[Layer]:
        return [layer for layer in self._parts.layers if layer.expansions]

    def _take(self, index: int, packed: PackedBlock) -> None:
        if time.monotonic() > self._told + _SILENCE:
            self._told = time.monotonic()
            PHASES.info("packing weights: layer %d of %d", index + 1, len(self._parts.layers))
        layer = self._parts.layers[index]
        mlp = layer.mlp
        if packed.qkv is not None and packed.out is not None:
            self._take_look_back(layer, packed.qkv, packed.out, packed.latent)
        if packed.mixer is not None:
            self._take_mixer(layer, *packed.mixer)
        if packed.experts is not None:
            self._replace(layer.block, "experts", TiledExperts(layer.experts, *packed.experts, self._library))
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

    def _take_look_back(
        self, layer: Layer, qkv: Tiles | MixedTiles, out: Tiles, packed_latent: tuple[Tiles, ...]
    ) -> None:
        attention = layer.attention
        if attention is None:
            self._take_mixer(layer, qkv, out)
            return
        self._take_in_turn(layer, attention, layer.heads, qkv)
        for name, each in zip(layer.expansions, packed_latent, strict=True):
            linear = getattr(attention, name)
            self._replace(attention, name, self._linear(linear, each, order_of(layer, linear)))
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


def _leave(linear: Any) -> None:
    """Let the file's pages of a packed layer leave memory."""
    if isinstance(linear, QuantisedLinear):
        source = linear.quantised.source
    else:
        source = linear.weight if type(linear) is nn.Linear else None
    if source is not None:
        mapped.leave(source)
