"""Models of transformers as the native decoder wants them: a layout with the weights of every layer."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.forward.anatomy import kv_sources
from foretoken.forward.quantised_experts import QuantisedExperts, in_halves
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight
from foretoken.forward.ssm.layout import Mixer, is_short
from foretoken.forward.stored_embedding import StoredEmbedding, dtype_of
from foretoken.forward.stored_weight import RoundedWeight, StoredWeight
from foretoken.models.adoption.parts import INPUT, Layer, Parts, head_dim_of
from foretoken.native import build
from foretoken.native.dense_weights import can_round, find_parameters
from foretoken.native.layout import Block, Experts, Inputs, Latent, LayerInput, Layout, MLPBlock, Projection, StateBlock
from foretoken.native.quantised import joined


def layout_of(model: Any, parts: Parts, max_length: int, mixers: Sequence[Mixer]) -> Layout:
    """Describe a model of one of the families.

    Args:
        model: a causal LM for which :func:`foretoken.models.adoption.fit.misfit` is None.
        max_length: positions that a row may have.
        mixers: its state-space layers.
    """
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
        kv_heads=max((_kv_heads(each, config) for each in parts.attentions), default=1),
        head_dim=max(map(head_dim_of, parts.attentions), default=16),
        mlp_width=max(parts.mlp_widths, default=0),
        norm_eps=next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-5),
        scaling=1.0 if attention is None else attention.scaling,
        num_blocks=config.num_hidden_layers,
        blocks=_blocks(model, parts, {mixer.layer: mixer for mixer in mixers}),
        rotary=tuple(parts.rotary(kind, max_length) for kind in kinds) or _no_rotary,
        max_length=max_length,
        final_norm_D=final_norm_D,
        head=_projection(model.lm_head),
        embedding_VD=_table(parts.embedding),
        inputs=_inputs(parts.body) if parts.has_inputs else None,
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
    config, kinds, sources = model.config, list(parts.rotary_kinds), kv_sources(model.config)
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
            yield MLPBlock(up=up, down=down, gate=gate, mlp_norm_D=mlp_norm_D, experts=experts)
            continue
        mixing = None
        if layer.mixer is not None:
            assert norm_D is not None
            mixing = _state_block(mixers[index], layer, norm_D, factors.mixer_out)
        if attention is None:
            assert mixing is not None
            yield replace(mixing, gate=gate, up=up, down=down, mlp_norm_D=mlp_norm_D, experts=experts)
            continue
        q, *opening, k, v = (each and _times(each, factors.attention_in, bias=1.0) for each in _heads(layer, config))
        assert q is not None
        window = getattr(config if parts.family.one_window else attention, "sliding_window", None)
        everywhere = window is None and hasattr(attention, "is_sliding")  # EXAONE without windows
        if not getattr(attention, "is_sliding", True):
            window = None
        rotated = getattr(attention, "use_rope", bool(window) or everywhere or not parts.family.rotates_windows)
        yield Block(
            q=q,
            k=k and _times(k, factors.key),
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
            latent=_latent(layer) if layer.expansions else None,
            kv_layer=sources.get(index),
            head_dim=head_dim_of(attention),
            kv_heads=_kv_heads(attention, config),
            norm_values=hasattr(attention, "v_norm"),
            input=_input(layer.whole) if parts.has_inputs else None,
            factor=float(getattr(layer.whole, "layer_scalar", 1.0)),
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
        gated = not hasattr(experts, "up_proj")  # Nemotron-H's are not
        both, down = experts.gate_up_proj if gated else experts.up_proj, experts.down_proj
        if layer.activation == "clamped_swiglu":
            both, down = in_halves(both, down)
            turned = experts.gate_up_proj_bias
            biases = torch.cat([turned[:, ::2], turned[:, 1::2]], dim=1), experts.down_proj_bias
        weights = *(each.flatten(0, 1) for each in both.chunk(1 + gated, dim=1)), down.flatten(0, 1)
    biases_of: tuple[Tensor | None, ...] = (None, None, None)
    if biases is not None:
        biases_of = *(each.flatten() for each in biases[0].chunk(2, dim=1)), biases[1].flatten()
    *gate, up, down = map(Projection, weights, biases_of)
    limited = getattr(layer.router, "topk_method", "") != "greedy"  # of DeepSeek-V2
    groups = (limited and getattr(layer.router, "num_group", 1)) or 1
    return Experts(
        router_ED=layer.scoring.weight,
        gate=gate[0] if gate else None,
        up=up,
        down=down,
        chosen=layer.router.top_k,
        normed=getattr(layer.router, "norm_topk_prob", not hasattr(layer.router, "topk_method")),
        opening_D=None if layer.opening is None else layer.opening.weight[0],
        router_bias_E=getattr(layer.router, "bias", None),
        # Ernie's are softmaxed, LFM2's are not even where nothing corrects them
        sigmoid=(layer.correction is not None and not hasattr(layer.router, "moe_statics"))
        or hasattr(layer.router, "use_expert_bias"),
        correction_E=None if layer.correction is None else layer.correction.flatten(),
        factor=float(getattr(layer.router, "routed_scaling_factor", getattr(layer.router, "route_scale", 1.0))),
        groups=groups,
        open_groups=layer.router.topk_group if groups > 1 else 1,
        group_best=1 if layer.correction is None else 2,
    )


def _kv_heads(attention: Any, config: Any) -> int:
    heads, groups = config.num_attention_heads, getattr(attention, "num_key_value_groups", None)
    if groups is not None:
        return int(heads // groups)
    return int(heads if hasattr(attention, "query_key_value") else getattr(config, "num_key_value_heads", heads))


def _latent(layer: Layer) -> Latent:
    attention = layer.attention
    *queries, keys_values = (_ordered(layer, getattr(attention, name)) for name in layer.expansions)
    norm = attention.kv_a_layernorm
    return Latent(
        queries=queries[0] if queries else None,
        keys_values=keys_values,
        query_norm_Q=attention.q_a_layernorm.weight if queries else None,
        norm_C=norm.weight,
        value_dim=attention.v_head_dim,
        eps=norm.variance_epsilon,
    )


def _inputs(body: Any) -> Inputs:
    """Of all layers: Gemma 4's per-layer embeddings."""
    table = body.embed_tokens_per_layer
    scale = float(table.embed_scale.to(dtype_of(table)))
    factors = body.per_layer_model_projection_scale, scale, body.per_layer_input_scale
    gain_I = body.per_layer_projection_norm.weight
    return Inputs(_projection(body.per_layer_model_projection), _table(table), gain_I, *factors)


def _input(layer: Any) -> LayerInput:
    gate, out = (_projection(getattr(layer, name)) for name in INPUT)
    return LayerInput(gate, out, layer.post_per_layer_input_norm.weight)


def _table(embedding: Any) -> Tensor | StoredWeight:
    """The weight of an embedding; the blocks of a file where it is stored."""
    return embedding.stored if isinstance(embedding, StoredEmbedding) else embedding.weight


def _heads(layer: Layer, config: Any) -> list[Projection | None]:
    """Projections to queries, perhaps gates, keys and values, None for missing ones; of latent attention to compressed
    rows, and None."""
    linears = [getattr(layer.attention, name) for name in layer.heads]
    found = [_ordered(layer, each) for each in linears]
    if layer.expansions:
        return [*found, None]
    if layer.opens:
        found[:1] = _split(found[0], [found[0].outputs // 2] * 2)
    if len(found) > 1 or layer.heads[0] == "q_proj":
        return [*found, *[None] * (3 - len(found))]
    if layer.by_head:
        return [*_split(found[0], [found[0].outputs // 3] * 3)]
    keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return [*_split(found[0], [each * layer.attention.head_dim for each in (config.num_attention_heads, keys, keys)])]


def order_of(layer: Layer, linear: Any) -> Tensor | None:
    """Which of its outputs native code has first, second, ...; None where they stand so.

    Of attention all queries (all gates), all keys, all values. Of latent attention with a rotary over neighbours the
    first of each pair, then the second ones: so they lie in the library's keys. Of a short convolution the gate, and
    the factor before the convolution and the other. Of a delta net by groups all z, q, k and v, or all a and b.
    """
    outputs_O, mixer = torch.arange(linear.out_features), layer.mixer
    if layer.by_head or (layer.opens and linear is layer.attention.q_proj):
        kinds = 3 if layer.by_head else 2
        return outputs_O.view(-1, kinds, head_dim_of(layer.attention)).transpose(0, 1).flatten()
    attention = layer.attention
    if layer.expansions and getattr(attention.config, "rope_interleave", False):
        widths = {attention.q_proj: head_dim_of(attention), getattr(attention, layer.heads[1]): linear.out_features}
        if len(layer.expansions) > 1:
            widths[attention.q_b_proj] = head_dim_of(attention)
        if linear not in widths:
            return None
        rows_HD, turned = outputs_O.view(-1, widths[linear]), attention.qk_rope_head_dim
        halves_HR = rows_HD[:, -turned:].unflatten(1, (-1, 2)).mT.flatten(1)
        return torch.cat([rows_HD[:, :-turned], halves_HR], dim=1).flatten()
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


def _no_rotary(positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of no width, for a model without attention."""
    empty_N0 = torch.empty(len(positions_N), 0)
    return empty_N0, empty_N0
