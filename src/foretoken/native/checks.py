"""Checks before a native forward; native code checks no size again.

A mistake found here is in our own code (a plan, a drafter, an executor), or the model's embedding is smaller than the
tokens it is given. The error names it; memory of others is never read or written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import Blocks, NativePlan
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.forward.span import Span
from foretoken.forward.stored_weight import StoredWeight
from foretoken.native.layout import Block, Experts, Latent, Layout, MLPBlock, Projection, StateBlock
from foretoken.native.packing import Tiles, form_of
from foretoken.native.quantised import CodedTiles
from foretoken.native.structs import SCORES, SETS, VOTERS, Layer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the weights were packed for.

    Attributes:
        num_layers, width, vocab_size: as in the layout.
        heads: of each layer key/value heads, and their width; zeros where it does not attend.
        kv_heads, head_dim: of the first layer that sees the whole context.
        embedded: tokens that the embedding has; 0: it has none, and every forward is entered.
        max_length: positions that a row may have.
        dtype: of keys and values.
        gated: whether its layers have MLPs, and none has experts.
    """

    num_layers: int
    width: int
    heads: Sequence[tuple[int, int]]
    kv_heads: int
    head_dim: int
    vocab_size: int
    embedded: int
    max_length: int
    dtype: torch.dtype
    gated: bool


def check_layout(layout: Layout) -> None:
    """Check a layout, except its blocks, for native code.

    Raises:
        ValueError: embedding, last gain or head have other sizes.
    """
    for name in ("final_norm_D", "final_shift_D"):
        _check_shape(f"layout.{name} is", getattr(layout, name), layout.width)
    table_ND = layout.position_embedding_ND
    expected = (layout.max_length, layout.width)
    if table_ND is not None and (table_ND.shape != expected or table_ND.dtype != layout.dtype):
        found = f"{list(table_ND.shape)} of {table_ND.dtype}"
        raise ValueError(f"layout.position_embedding_ND is {found}: {expected} of {layout.dtype}")
    embedding = layout.embedding_VD
    if embedding is not None:
        dtype = torch.float32 if isinstance(embedding, StoredWeight) else embedding.dtype
        if embedding.shape[1:] != (layout.width,) or dtype != layout.dtype:
            raise ValueError(
                f"layout.embedding_VD is {list(embedding.shape)} of {dtype}: [{embedding.shape[0]}, {layout.width}] "
                f"of {layout.dtype}"
            )
    if layout.inputs is not None:
        every = layout.num_blocks * layout.inputs.input_width
        _check_projection("layout.inputs.projection", layout.inputs.projection, every, layout.width)
        table = layout.inputs.embedding
        dtype = torch.float32 if isinstance(table, StoredWeight) else table.dtype
        if embedding is None or table.shape[0] < embedding.shape[0] or table.shape[1] != every or dtype != layout.dtype:
            raise ValueError(
                f"layout.inputs.embedding is {list(table.shape)} of {dtype}: as many rows as the embedding"
            )
    if isinstance(layout.head, Projection):
        _check_projection("layout.head", layout.head, layout.head.outputs, layout.width)


def check_block(layout: Layout, block: Block | StateBlock | MLPBlock, halves: Sequence[int]) -> None:
    """Check a block for native code, once, when it is packed.

    Args:
        halves: half the elements that each of the layout's rotaries rotates.
    Raises:
        ValueError: a projection, a bias, a scale or a gain has another size than the layout gives it, a part of an MLP
            is missing, a rotary is none of the layout's, experts do not fit together, a mixer next to attention has an
            MLP of its own, or a parallel block has more than attention and one other branch that are added as they are.
    """
    width = layout.width
    _check_shape("block.mlp_norm_D is", block.mlp_norm_D, width)
    _check_mlp(block, layout.mlp_width, width)
    if block.experts is not None:
        _check_experts(block.experts, width)
    if isinstance(block, MLPBlock):
        return
    if isinstance(block, StateBlock):
        inner = block.mixer.heads * block.mixer.head_width
        steps = inner if block.mixer.short else block.mixer.heads * (2 if block.mixer.delta else 1)
        projected, found = inner + block.mixer.channels + steps, sum(each.outputs for each in block.project)
        if found != projected or any(each.outputs % 16 for each in block.project[:-1]):
            raise ValueError(f"block.project has {found} outputs: {projected}, in multiples of 16 but for the last")
        for each in block.project:
            _check_projection("block.project", each, each.outputs, width, scaled=True)
        _check_projection("block.out", block.out, width, inner)
        return
    if block.parallel_mixer is not None:
        check_block(layout, block.parallel_mixer, halves)
        if block.parallel or block.parallel_mixer.up is not None or block.parallel_mixer.experts is not None:
            raise ValueError("block.next to: a mixer without an MLP or experts, next to attention that is not parallel")
    head_dim, kv_heads = block.head_dim or layout.head_dim, block.kv_heads or layout.kv_heads
    check_within("block.head_dim", head_dim, 16, layout.head_dim)
    check_within("block.kv_heads", kv_heads, 1, layout.kv_heads)
    queries, keys = layout.heads * head_dim, kv_heads * head_dim
    own = {"q": (queries, block.q), "opening": (queries, block.opening), "k": (keys, block.k), "v": (keys, block.v)}
    if block.latent is not None:
        _check_latent(layout, block, block.latent, halves)
        own, queries = {}, layout.heads * block.latent.value_dim
    elif block.k is None and (block.v is not None or block.k_norm_d is not None):
        raise ValueError("a block that reads another layer's keys has no k, no v and no k_norm_d")
    if block.k is None and block.kv_layer is None and block.window:
        raise ValueError("a block that reads another decoder's keys has no window")
    if block.k is not None and block.kv_layer is not None:
        raise ValueError(f"a block that reads the keys of layer {block.kv_layer} has no k")
    for name, (outputs, projection) in own.items():
        if projection is not None:
            _check_projection(f"block.{name}", projection, outputs, width, scaled=True)
    _check_projection("block.out", block.out, width, queries, scaled=True)
    for name in ("attention_norm_D", "attention_end_norm_D", "mlp_end_norm_D", "attention_shift_D", "mlp_shift_D"):
        _check_shape(f"block.{name} is", getattr(block, name), layout.width)
    every = block.q_norm_d is not None and block.q_norm_d.dim() == 1 and len(block.q_norm_d) != head_dim
    for name, heads in (("q_norm_d", layout.heads), ("k_norm_d", kv_heads)):
        gain = getattr(block, name)
        if gain is None or gain.shape != (heads, head_dim):
            _check_shape(f"block.{name} is", gain, head_dim * (heads if every else 1))
    _check_shape("block.sinks_H is", block.sinks_H, layout.heads)
    if block.parallel:
        ends = block.attention_end_norm_D is not None or block.mlp_end_norm_D is not None
        if ends or layout.residual_scale != 1 or (block.up is None) == (block.experts is None):
            raise ValueError("block.parallel: an MLP or experts, no norms after the branches, and residual_scale 1")
    if (block.q_norm_d is None) != (block.k_norm_d is None) and every:
        raise ValueError("k_norm_d is missing: queries and keys are both normed over all heads, or neither is")
    if block.rotary is not None:
        check_within("block.rotary", block.rotary, 0, len(halves) - 1)
        check_within("half of a rotary", halves[block.rotary], 0, head_dim // 2)
    _check_input(layout, block)


def check_kv_layer(layers: Sequence[Layer], source: int) -> None:
    """Check that the last layer so far can read the keys and values of another one."""
    check_within("block.kv_layer", source, 0, len(layers) - 2)
    own, other = layers[-1], layers[source]
    if (own.head_dim, own.kv_heads, other.kv_layer) != (other.head_dim, other.kv_heads, source):
        raise ValueError(f"block.kv_layer={source}: a layer with keys of its own, in heads of the same sizes")


def _check_input(layout: Layout, block: Block) -> None:
    if (block.input is None) != (layout.inputs is None):
        raise ValueError("block.input: every block takes its own input, or the layout has no inputs")
    if block.factor != 1 and block.mlp_end_norm_D is None and block.input is None:
        raise ValueError(f"block.factor={block.factor}: only after a norm at the end of the layer")
    if block.input is None or layout.inputs is None:
        return
    own, width = layout.inputs.input_width, layout.width
    _check_projection("block.input.gate", block.input.gate, own, width)
    _check_projection("block.input.out", block.input.out, width, own)
    _check_shape("block.input.norm_D is", block.input.norm_D, width)


def _check_latent(layout: Layout, block: Block, latent: Latent, halves: Sequence[int]) -> None:
    width, heads, d = layout.width, layout.heads, layout.head_dim
    rotary = -1 if block.rotary is None else block.rotary
    check_within("block.rotary", rotary, 0, len(halves) - 1)
    turned, rank, queries = 2 * halves[rotary], latent.keys_values.weight_OK.shape[1], block.q.outputs
    other = block.v is not None or block.opening is not None or block.parallel or layout.kv_heads != heads
    if block.k is None or other:
        raise ValueError("block.latent: k for the keys and values of all heads, no v, no gates, and no parallel block")
    if any(each % 16 for each in (turned, latent.value_dim, queries)) or any(each % 32 for each in (rank, queries)):
        raise ValueError("block.latent: rotated elements and values in multiples of 16, compressed rows of 32")
    check_within("block.latent.value_dim", latent.value_dim, 16, d)
    if latent.queries is not None:
        _check_projection("block.latent.queries", latent.queries, heads * d, queries)
        _check_shape("block.latent.query_norm_Q is", latent.query_norm_Q, queries)
    _check_projection("block.q", block.q, queries if latent.queries else heads * d, width)
    _check_projection("block.k", block.k, rank + turned, width)
    _check_projection("block.latent.keys_values", latent.keys_values, heads * (d - turned + latent.value_dim), rank)
    _check_shape("block.latent.norm_C is", latent.norm_C, rank)


def _check_mlp(block: Block | StateBlock | MLPBlock, most: int, width: int) -> None:
    up = block.up
    if up is None or block.down is None:
        given = [name for name in ("gate", "up", "down") if getattr(block, name) is not None]
        if given:
            raise ValueError(f"block.{given[0]} stands alone: an MLP has up and down, perhaps a gate, or none of them")
        return
    channels = up.outputs
    if channels < 32 or channels % 32 or channels > most:
        raise ValueError(f"block.up has {channels} outputs: a multiple of 32, at most {most}")
    for name, outputs, inputs in (("gate", channels, width), ("up", channels, width), ("down", width, channels)):
        projection = getattr(block, name)
        if projection is not None:
            gated = block.gate is not None and name != "down"
            _check_projection(f"block.{name}", projection, outputs, inputs, scaled=gated)


def _check_experts(experts: Experts, width: int) -> None:
    count, channels = experts.count, experts.width
    check_within("experts.groups", experts.groups, 1, 64)
    check_within("experts.open_groups", experts.open_groups, 1, experts.groups)
    check_within("experts.chosen", experts.chosen, 1, count // experts.groups * experts.open_groups)
    if channels < 32 or channels % 32:
        raise ValueError(f"experts.width={channels}: a multiple of 32")
    _check_shape("experts.router_ED is", experts.router_ED, count, width)
    _check_shape("experts.opening_D is", experts.opening_D, width)
    for name in ("router_bias_E", "correction_E"):
        _check_shape(f"experts.{name} is", getattr(experts, name), count)
    for name, outputs, inputs in (("gate", channels, width), ("up", channels, width), ("down", width, channels)):
        if name != "gate" or experts.gate is not None:
            _check_projection(f"experts.{name}", getattr(experts, name), count * outputs, inputs)


def _check_projection(name: str, given: Projection, outputs: int, inputs: int, *, scaled: bool = False) -> None:
    _check_shape(f"{name} is", given.weight_OK, outputs, inputs)
    _check_shape(f"{name} has a bias", given.bias_O, outputs)
    if isinstance(given.scale, Tensor):
        _check_shape(f"{name} has a scale", given.scale, outputs)
    if not scaled and (isinstance(given.scale, Tensor) or given.scale != 1):
        raise ValueError(f"{name} has a scale: native code multiplies nothing there")


def _check_shape(what: str, values: Tensor | QuantisedWeight | None, *shape: int) -> None:
    if values is not None and tuple(values.shape) != shape:
        raise ValueError(f"{what} {list(values.shape)}: {list(shape)}")


def check(sizes: Sizes, batch: PackedBatch, plan: NativePlan, span: Span) -> None:
    """Check the inputs of a forward, except the head and the cache's buffers (check_head, check_buffers).

    Raises:
        InputError: a token is not in the embedding.
        ValueError: anything else; the message names the field, its value and the allowed values.
    """
    num_rows = len(batch.tokens)
    if not num_rows or len(batch.positions) != num_rows:
        raise ValueError(f"a batch has {num_rows} tokens and {len(batch.positions)} positions: one each, for every row")
    check_within("span.first", span.first, 0, span.last)
    check_within("span.last", span.last, span.first, sizes.num_layers)
    _check_entry(sizes, batch, span)
    _check_range("batch.wanted", batch.wanted, num_rows)
    if list(span.taps) != sorted(set(span.taps)) or any(not span.first < each <= span.last for each in span.taps):
        raise ValueError(f"span.taps={span.taps}: increasing depths after layer {span.first}, up to {span.last}")
    if span.tap_rows is not None:
        _check_range("span.tap_rows", span.tap_rows, num_rows)
    if plan.thresholds is not None:
        if len(plan.thresholds) != num_rows:
            raise ValueError(f"plan.thresholds has {len(plan.thresholds)} entries: one for each of {num_rows} rows")
        if not sizes.gated:
            raise ValueError("plan.thresholds needs a gated MLP in every layer, and no experts")
    if span.first < span.last:
        _check_range("batch.positions", batch.positions, sizes.max_length)
        _check_segments(batch, plan.cache)
    if plan.blocks is not None:
        if plan.cache.coded:
            raise ValueError("plan.blocks selects blocks by their keys, which the cache has in codes")
        _check_blocks(sizes, batch.segments, plan.blocks)


def check_head(own: Tiles, packed: Tiles, count: int, top: int) -> None:
    """Check the head of a forward, which may be another decoder's.

    Args:
        own, packed: the decoder's own head, and the head of this forward.
        count: rows of the latter.
        top: tokens of each row to rank.
    """
    values = packed.data if isinstance(packed, CodedTiles) else packed
    if form_of(packed) != form_of(own) or not is_plain(values):
        raise ValueError(f"head is {form_of(packed)}: packed like the decoder's own, {form_of(own)}")
    check_within("head.vocab_size", count, 1 + 16 * (len(packed) - 1), 16 * len(packed))
    check_within("top", top, 0, count)


def check_buffers(sizes: Sizes, cache: KVCache, pairs: Sequence[tuple[Tensor, Tensor] | None]) -> None:
    """Check the cache's keys and values of each layer with attention."""
    dtype = cache.kv_dtype or sizes.dtype
    for layer, (pair, (heads, width)) in enumerate(zip(pairs, sizes.heads, strict=True)):
        expected = (cache.num_slots, heads, cache.capacity, width + (4 if cache.coded else 0))
        for what, buffer in zip(("keys", "values"), pair or (), strict=pair is not None):
            if buffer.shape != expected or buffer.dtype != dtype or not is_plain(buffer):
                raise ValueError(
                    f"the cache's {what} of layer {layer} are {list(buffer.shape)} of {buffer.dtype}, but this "
                    f"decoder writes {list(expected)} of {dtype} on the CPU: give it a cache of its own"
                )


def check_summaries(sizes: Sizes, segments: Sequence[Segment], blocks: Blocks, summaries: Mapping[int, Tensor]) -> None:
    """Check the means or bounds of blocks, for the layers that select by them."""
    slots = 1 + max(segment.slot for segment in segments)
    count = max(segment.prefix // blocks.size for segment in segments)
    width = sizes.head_dim * (2 if blocks.score == "bounds" else 1)
    shapes = {each.shape for each in summaries.values()}
    for layer, each in summaries.items():
        fits = each.dim() == 4 and each.shape[0] >= slots and each.shape[2] >= count
        fits = fits and (each.shape[1], each.shape[3]) == (sizes.kv_heads, width)
        if not fits or len(shapes) > 1 or each.dtype != torch.float32 or not is_plain(each):
            raise ValueError(
                f"plan.blocks.summaries({layer}) is {list(each.shape)} of {each.dtype}: of every layer alike, float32 "
                f"[{slots} or more, {sizes.kv_heads}, {count} or more, {width}]"
            )


def _check_entry(sizes: Sizes, batch: PackedBatch, span: Span) -> None:
    entering = span.entering_TD
    if entering is None:
        if not sizes.embedded:
            raise ValueError("span.entering_TD is missing: this decoder has no embedding")
        if min(batch.tokens) < 0 or max(batch.tokens) >= sizes.embedded:
            token = next(each for each in batch.tokens if not 0 <= each < sizes.embedded)
            raise InputError(f"token {token} is not in the model's embedding, which has {sizes.embedded} entries")
        return
    expected = (len(batch.tokens), sizes.width)
    if entering.shape != expected or not entering.is_floating_point() or entering.device.type != "cpu":
        raise ValueError(
            f"span.entering_TD is {list(entering.shape)} of {entering.dtype} on {entering.device}: "
            f"floating, {list(expected)}, on the CPU"
        )


def _check_segments(batch: PackedBatch, cache: KVCache) -> None:
    start = 0
    slots = set()
    for segment in batch.segments:
        slot, prefix, tail, rows = segment.slot, segment.prefix, segment.tail, segment.num_rows
        check_within("segment.slot", slot, 0, cache.num_slots - 1)
        if segment.start != start or rows < 1 or prefix < 0 or tail < 0:
            raise ValueError(
                f"{segment}: segments follow each other, the next from row {start} on, with a row at least"
            )
        if prefix + tail + rows > cache.capacity:
            raise ValueError(
                f"slot {slot} needs {prefix + tail + rows} rows, but the capacity of the cache is {cache.capacity}: "
                "reserve them before the forward"
            )
        seen = segment.seen
        if seen is not None and (seen.shape != (rows, tail + rows) or seen.dtype != torch.bool or not is_plain(seen)):
            raise ValueError(f"segment.seen is {list(seen.shape)} of {seen.dtype}: bool [{rows}, {tail + rows}]")
        start += rows
        slots.add(slot)
    if start != len(batch.tokens) or len(slots) < len(batch.segments):
        raise ValueError(
            f"{len(batch.segments)} segments of {len(slots)} slots hold {start} of {len(batch.tokens)} rows: "
            "each row belongs to one, and each has a slot of its own"
        )


def _check_blocks(sizes: Sizes, segments: Sequence[Segment], blocks: Blocks) -> None:
    if blocks.size < 16 or blocks.size % 16:
        raise ValueError(f"plan.blocks.size={blocks.size}: a multiple of 16")
    check_within("plan.blocks.sinks", blocks.sinks, 0, None)
    check_within("plan.blocks.locals", blocks.locals, 0, None)
    if blocks.sets not in SETS:
        raise ValueError(f"plan.blocks.sets={blocks.sets!r}: one of {', '.join(SETS)}")
    if blocks.score not in SCORES or (blocks.summaries is None) != (blocks.score == "exact"):
        raise ValueError(
            f"plan.blocks.score={blocks.score!r} {'without' if blocks.summaries is None else 'with'} summaries: "
            "exact without, bounds or mean with them"
        )
    if blocks.voters not in VOTERS:
        raise ValueError(f"plan.blocks.voters={blocks.voters!r}: one of {', '.join(VOTERS)}")
    if len(blocks.keep) != len(segments):
        raise ValueError(f"plan.blocks.keep has {len(blocks.keep)} entries for {len(segments)} segments")
    least = 1 if blocks.sets == "global" else sizes.kv_heads
    for segment, keep in zip(segments, blocks.keep, strict=True):
        if keep:
            check_within("plan.blocks.keep", keep, least, sizes.kv_heads * (segment.prefix // blocks.size))


def _check_range(name: str, values: Sequence[int], end: int) -> None:
    if values and (min(values) < 0 or max(values) >= end):
        value = next(each for each in values if not 0 <= each < end)
        raise ValueError(f"{name} holds {value}: at least 0 and below {end}")


def check_within(name: str, value: int, least: int, most: int | None) -> None:
    """Refuse a number below ``least`` or above ``most`` (None: no upper bound) with a ValueError."""
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}={value}: {limit}")


def is_plain(values: Tensor) -> bool:
    """Whether native code can read a tensor by its address: contiguous, on the CPU."""
    return values.is_contiguous() and values.device.type == "cpu"
