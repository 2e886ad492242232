"""The native CPU decoder: the whole forward of a common decoder in one native call.

For models of a few hundred million parameters most of a small step is the cost of calling hundreds of small kernels.
This path does the same arithmetic (decoder.c) for every decoder that a layout (layout.py) can describe: models of
transformers (models/adoption/description.py), and the draft layers of methods.

Letters: T packed rows, V vocabulary, D width, Q queries, keys and values of a row together.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.core.pages import give_back_free_memory
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import Blocks, NativePlan
from foretoken.forward.span import Span
from foretoken.forward.ssm.layout import Mixer
from foretoken.forward.stored_weight import StoredWeight
from foretoken.native import checks, structs, team
from foretoken.native.cache_addresses import CacheAddresses
from foretoken.native.call import Angles, OpenCall, Ranked
from foretoken.native.declared import NUMBERS
from foretoken.native.layout import Block, Experts, Head, Inputs, Layout, MLPBlock, PackedBlock, Projection, StateBlock
from foretoken.native.low_rank import RowAdapters
from foretoken.native.packing import Tiles, described, packed_apart, packed_in_turn, packed_of
from foretoken.native.rotary import RotaryTables
from foretoken.native.shelf import Shelf
from foretoken.native.states import NativeStates, described_mixer
from foretoken.native.stored_blocks import block_number
from foretoken.native.superblocks import MixedTiles


class _NativeBlocks(NamedTuple):
    """A description, and the memory that it points to."""

    native: structs.Blocks
    memory: tuple[object, ...]


class NativeDecoder:
    """A decoder that computes its forward in one native call; several threads may use it at once (team.py).

    Args:
        layout: the decoder's description; its blocks are read and packed one after the other.
        library: compiled decoder.c; see build.py.
        taken: called with each block's index and packed weights as soon as they are packed.
    Attributes:
        sizes: the sizes that the weights were packed for.
    """

    def __init__(
        self, layout: Layout, library: ctypes.CDLL, taken: Callable[[int, PackedBlock], None] | None = None
    ) -> None:
        self.library = library
        self._keep: list[Any] = []  # memory that native code reads
        self._dtype = layout.dtype
        rotaries = layout.rotary if isinstance(layout.rotary, tuple) else (layout.rotary,)
        self._rotaries = [RotaryTables(each) for each in rotaries]
        checks.check_layout(layout)
        layers = (structs.Layer * layout.num_blocks)()
        self._mixers: dict[int, Mixer] = {}
        self._external_kv_layers: set[int] = set()  # layers that read another decoder's keys
        self._keyless: set[int] = set()  # layers that have no keys and values here
        for index, block in enumerate(layout.blocks):
            checks.check_block(layout, block, [each.half for each in self._rotaries])
            packed = self._pack(layers[index], block, index, layout)
            if isinstance(block, Block) and block.kv_layer is not None:
                checks.check_kv_layer(layers[: index + 1], block.kv_layer)
            if taken is not None:
                taken(index, packed)
        give_back_free_memory()  # of layers that were decoded: the head takes the most
        self.head = layout.head if isinstance(layout.head, Head) else self._packed_head(layout.head, layout)
        self.vocab_size = self.head.vocab_size
        table, embedding_blocks = _table(layout.embedding_VD)
        embedding, position_embedding = (
            None if each is None else each.detach().contiguous() for each in (table, layout.position_embedding_ND)
        )
        inputs = {} if layout.inputs is None else self._inputs(layout.inputs)
        self._keep += [embedding, position_embedding, layers, self.head]
        self._cache_addresses: WeakKeyDictionary[KVCache, CacheAddresses] = WeakKeyDictionary()
        self._shelf = Shelf()
        whole = next((each for each in layers if each.head_dim and not each.window), structs.Layer())
        self.sizes = checks.Sizes(
            num_layers=layout.num_blocks,
            width=layout.width,
            heads=[(each.kv_heads, each.head_dim) for each in layers],
            kv_heads=whole.kv_heads or layout.kv_heads,
            head_dim=whole.head_dim or layout.head_dim,
            vocab_size=self.vocab_size,
            embedded=0 if embedding is None else len(embedding),
            max_length=layout.max_length,
            dtype=layout.dtype,
            gated=layout.mlp_width > 0
            and not any(layer.experts or layer.gate_up_scale for layer in layers)
            and all(layer.gated or not layer.mlp_width for layer in layers),
        )
        opened = 1 + max((layer.opens for layer in layers), default=0)
        self._model = structs.Model(
            **structs.same_named(structs.Model, layout, "activation", "logit_cap", "logit_scale"),
            bf16=int(layout.dtype == torch.bfloat16),
            num_layers=layout.num_blocks,
            vocab=self.vocab_size,
            qkv_stride=max(((layout.heads * opened + 2 * each.kv_heads) * each.head_dim for each in layers), default=0),
            **inputs,
            logits_stride=len(self.head.packed) * 16,
            activation=structs.ACTIVATIONS[layout.activation],
            eps=layout.norm_eps,
            logit_cap=self.head.cap,
            logit_scale=self.head.scale,
            layers=layers,
            embedding=None if embedding is None else embedding.data_ptr(),
            embedding_blocks=embedding_blocks,
            position_embedding=None if position_embedding is None else position_embedding.data_ptr(),
            head=described(self.head.packed),
            head_bias=_address(self.head.bias_V),
            final_norm=self._floats(layout.final_norm_D),
            final_shift=self._gain(layout.final_shift_D),
        )

    @property
    def windows(self) -> list[int]:
        """Each layer's window in positions; 0: full attention."""
        return [self._model.layers[index].window for index in range(self._model.num_layers)]

    def facts(self, layer: int) -> dict[str, float | bool]:
        """The numbers of a layer's description, and of all else whether it is there."""
        native = self._model.layers[layer]
        own = {"index", "factor", *(["kv_layer"] if native.kv_layer == layer else [])}
        found = {name: (kind, getattr(native, name)) for name, kind in native._fields_ if name not in own}
        return {name: value if kind in NUMBERS else bool(value) for name, (kind, value) in found.items()}

    def forward(
        self, batch: PackedBatch, plan: NativePlan, span: Span, *, top: int, head: Head | None = None
    ) -> Ranked:
        """Compute the plan, the batch's rows written into its cache; hidden states are float32.

        Args:
            head: read in place of its own one, of the same width and dtype.
        Raises:
            InputError: a token is not in the embedding.
            ValueError: batch, plan or span do not fit this decoder; see checks.py.
            MemoryError: the workspace of the forward cannot be allocated.
        """
        own_head = self.head if head is None else head
        if self._external_kv_layers.intersection(range(span.first, span.last)):
            raise ValueError("a layer that reads another decoder's keys is run by CrossAttentionDecoder.passes")
        checks.check(self.sizes, batch, plan, span)
        checks.check_head(self.head.packed, own_head.packed, own_head.vocab_size, top)
        model = self._model if head is None else self._with_head(head)
        own = team.current()
        call = self._open(batch, plan.cache, span, model, top=top, threads=own.threads)
        blocks, attention = None, ctypes.c_double(0)
        if plan.blocks is not None:
            for native, keep in zip(call.segments, plan.blocks.keep, strict=True):
                native.keep = keep
            blocks = self._blocks(plan.blocks, batch, span)
            call.native.blocks = ctypes.pointer(blocks.native)
        states = None
        if any(span.first <= layer < span.last for layer in self._mixers):
            states = NativeStates(self._mixers, plan.cache, batch, span, self._dtype)
            call.native.states = ctypes.pointer(states.native)
        thresholds = array("f", plan.thresholds or ())
        if plan.thresholds:
            call.native.thresholds = thresholds.buffer_info()[0]
        if plan.clock is not None:
            call.native.attention_seconds = ctypes.addressof(attention)
        adapters = None
        if any(segment.adapter is not None for segment in batch.segments):
            if plan.thresholds:
                raise ValueError("rows of an adapter have no MLP that leaves channels out")
            adapters = RowAdapters(batch)
            call.native.adapters, call.native.most_rank = ctypes.addressof(adapters.rows), adapters.rank
        handle = own.handle(self.library)  # held while the call runs
        if self.library.foretoken_forward(handle.address, ctypes.addressof(model), ctypes.addressof(call.native)):
            raise MemoryError(f"there is no memory for a forward of {len(batch.tokens)} rows")
        if states is not None:
            states.done()
        if plan.clock is not None:
            plan.clock.attention_seconds += attention.value
        return call.ranked(own_head.vocab_size, {depth: call.tapped[place] for place, depth in enumerate(span.taps)})

    def _open(
        self,
        batch: PackedBatch,
        cache: KVCache,
        span: Span,
        model: structs.Model,
        *,
        top: int,
        threads: int,
        forwards: int = 1,
    ) -> OpenCall:
        """Describe a forward of checked rows, with memory for the results of the ``forwards`` in this native call."""
        attends = span.first < span.last
        return OpenCall(
            batch,
            cache,
            span,
            addresses=self.cache_addresses(cache) if attends else None,
            angles=self._angles(max(batch.positions) + forwards if attends else 0),
            logits_MV=self._shelf.take(forwards * len(batch.wanted), model.logits_stride),
            width=model.width,
            top=top,
            threads=threads,
        )

    def forget_positions(self) -> None:
        """Free the memory of rotary tables; later forwards compute the entries that they need again."""
        for each in self._rotaries:
            each.forget()

    def _angles(self, length: int) -> Angles:
        """Angles of at least ``length`` positions, by each of the layout's rotaries."""
        tables = [each.up_to(length) for each in self._rotaries]
        native = (structs.Angles * len(tables))()
        for each, table in zip(native, tables, strict=True):
            each.cos, each.sin, each.queries = map(_address, table)
        return Angles(native, tables)

    def _with_head(self, head: Head) -> structs.Model:
        """A copy of the description, with another head."""
        model = structs.Model.from_buffer_copy(self._model)
        model.vocab, model.head = head.vocab_size, described(head.packed)
        model.logits_stride, model.logit_scale, model.logit_cap = len(head.packed) * 16, head.scale, head.cap
        model.head_bias = _address(head.bias_V)
        return model

    def _blocks(self, blocks: Blocks, batch: PackedBatch, span: Span) -> _NativeBlocks:
        """Describe the selection of blocks: the layers, their summaries, and memory for scores and choices."""
        layers = [self._model.layers[index] for index in range(span.first, span.last)]
        seeing = [layer.index for layer in layers if not layer.window and layer.index not in self._keyless]
        selecting = [index for index in seeing if index == seeing[0] or blocks.selects(index)]
        selects = array("B", bytes(self._model.num_layers))
        summaries: dict[int, Tensor] = {}
        for index in selecting:
            selects[index] = 1
            if blocks.summaries is not None:
                summaries[index] = blocks.summaries(index)
        checks.check_summaries(self.sizes, batch.segments, blocks, summaries)
        pointers = (structs.P * self._model.num_layers)()
        for number, each in summaries.items():
            pointers[number] = each.data_ptr()
        most = max(segment.prefix // blocks.size for segment in batch.segments)
        places = len(batch.segments) * self._model.kv_heads
        scores, chosen = array("f", bytes(4 * places * most)), array("i", bytes(4 * places * (1 + most)))
        native = structs.Blocks(
            size=blocks.size,
            sinks=blocks.sinks,
            locals=blocks.locals,
            sets=structs.SETS[blocks.sets],
            score=structs.SCORES[blocks.score],
            voters=structs.VOTERS[blocks.voters],
            capacity=next((each.shape[2] for each in summaries.values()), 0),
            most=most,
            selects=selects.buffer_info()[0],
            summaries=ctypes.addressof(pointers),
            scores=scores.buffer_info()[0],
            chosen=chosen.buffer_info()[0],
        )
        return _NativeBlocks(native, (pointers, selects, scores, chosen, summaries))

    def cache_addresses(self, cache: KVCache) -> CacheAddresses:
        """The addresses of the cache's memory; looked up again when the cache has grown."""
        found = self._cache_addresses.get(cache)
        if found is not None and found.serves(cache):
            return found
        pairs: list[tuple[Tensor, Tensor] | None] = []
        for layer, (heads, width) in enumerate(self.sizes.heads):
            row = torch.empty(heads, 0, width + (4 if cache.coded else 0), dtype=cache.kv_dtype or self._dtype)
            pairs.append(None if layer in self._keyless else cache.buffers(layer, row, row))
        checks.check_buffers(self.sizes, cache, pairs)
        found = self._cache_addresses[cache] = CacheAddresses(self.library, cache, pairs)
        return found

    # ------------------------------------------------------------------ packing

    @torch.no_grad()
    def _pack(
        self, native: structs.Layer, block: Block | StateBlock | MLPBlock, index: int, layout: Layout
    ) -> PackedBlock:
        qkv: Tiles | MixedTiles | None = None
        out = gate_up = down = None
        experts: tuple[Tiles, Tiles] | None = None
        mixer: tuple[Tiles | MixedTiles, Tiles] | None = None
        native.kv_layer = index
        if isinstance(block, StateBlock):
            qkv, out = self._packed_mixer(native, block, index)
        elif isinstance(block, Block):
            native.head_dim, native.kv_heads = block.head_dim or layout.head_dim, block.kv_heads or layout.kv_heads
            if block.kv_layer is not None:
                native.kv_layer = block.kv_layer
            qkv, out = self._heads(native, block)
            native.parallel = int(block.parallel)
            native.attention_shift, native.mlp_shift = map(self._gain, (block.attention_shift_D, block.mlp_shift_D))
            if block.parallel_mixer is not None:
                mixer_layer = structs.Layer(index=index)
                mixer = self._packed_mixer(mixer_layer, block.parallel_mixer, index)
                self._keep.append(mixer_layer)
                native.parallel_mixer = ctypes.addressof(mixer_layer)
        if block.experts is not None:
            experts = self._packed_experts(native, block.experts)
        if block.up is not None and block.down is not None:
            gate_up, down = self._packed_mlp(native, block.gate, block.up, block.down)
        native.mlp_norm = self._gain(block.mlp_norm_D)
        native.index, native.factor = index, block.factor if isinstance(block, Block) else 1.0
        if native.external_kv:
            self._external_kv_layers.add(index)
        if not isinstance(block, Block) or block.k is None:
            self._keyless.add(index)
        latent = () if not isinstance(block, Block) or block.latent is None else self._packed_latent(native, block)
        return PackedBlock(qkv, out, gate_up, down, experts, mixer, latent)

    def _packed_latent(self, native: structs.Layer, block: Block) -> tuple[Tiles, ...]:
        latent = block.latent
        assert latent is not None
        given = [each for each in (latent.queries, latent.keys_values) if each is not None]
        packed = tuple(map(self._packed, given))
        described_latent = structs.Latent(
            **structs.same_named(structs.Latent, latent),
            query_norm=self._gain(latent.query_norm_Q),
            norm=self._floats(latent.norm_C),
            query_rank=block.q.outputs,
            rank=latent.keys_values.weight_OK.shape[1],
            keys_values=described(packed[-1]),
        )
        if latent.queries is not None:
            described_latent.queries = described(packed[0])
        self._keep.append(described_latent)
        native.latent = ctypes.pointer(described_latent)
        return packed

    def _packed_mixer(self, native: structs.Layer, block: StateBlock, index: int) -> tuple[Tiles | MixedTiles, Tiles]:
        project, out = self._packed_apart(block.project), self._packed(block.out)
        mixer = structs.Mixer()
        described_mixer(mixer, block, len(self._mixers), 16 * len(project), self._keep)
        self._mixers[index] = block.mixer
        self._keep.append(mixer)
        native.mixer = ctypes.pointer(mixer)
        native.attention_norm = self._floats(block.mixer_norm_D)
        native.qkv, native.out = described(project), described(out)
        native.qkv_scale = self._scales(*block.project)
        native.qkv_bias, native.out_bias = self._bias(*block.project), self._bias(block.out)
        return project, out

    def _packed_mlp(
        self, native: structs.Layer, gate: Projection | None, up: Projection, down: Projection
    ) -> tuple[Tiles, Tiles]:
        gate_up = self._packed(up) if gate is None else self._gates(gate, up)
        packed = gate_up, self._packed(down)
        native.gate_up, native.down = (described(each) for each in packed)
        native.mlp_width, native.gated = up.outputs, int(gate is not None)
        native.down_bias = self._bias(down)
        if gate is None:
            native.gate_up_bias = self._bias(up)
            return packed
        if gate.bias_O is not None or up.bias_O is not None:
            native.gate_up_bias = self._floats(_in_turn(_bias_of(gate), _bias_of(up)))
        if _is_scaled(gate) or _is_scaled(up):
            native.gate_up_scale = self._floats(_in_turn(_scale_of(gate), _scale_of(up)))
        return packed

    def _packed_experts(self, native: structs.Layer, experts: Experts) -> tuple[Tiles, Tiles]:
        gate, down = experts.gate, self._packed(experts.down)
        gate_up = self._packed(experts.up) if gate is None else self._gates(gate, experts.up)
        router_ED, opening_D = experts.router_ED, experts.opening_D
        if opening_D is not None:
            router_ED = torch.cat([router_ED, opening_D[None]])
        described_experts = structs.Experts(
            **structs.same_named(structs.Experts, experts),
            router=described(self._packed(Projection(router_ED))),
            gate_up=described(gate_up),
            down=described(down),
            gated=int(gate is not None),
            opens=int(opening_D is not None),
            correction=self._gain(experts.correction_E),
        )
        if experts.router_bias_E is not None:
            described_experts.router_bias = self._floats(_padded_bias(experts.router_bias_E, len(router_ED)))
        if gate is not None and (gate.bias_O is not None or experts.up.bias_O is not None):
            described_experts.gate_up_bias = self._floats(_in_turn(_bias_of(gate), _bias_of(experts.up)))
        if experts.down.bias_O is not None:
            described_experts.down_bias = self._floats(experts.down.bias_O)
        self._keep.append(described_experts)
        native.experts = ctypes.pointer(described_experts)
        return gate_up, down

    def _heads(self, native: structs.Layer, block: Block) -> tuple[Tiles | MixedTiles, Tiles]:
        heads = [each for each in (block.q, block.opening, block.k, block.v) if each is not None]
        native.external_kv = int(block.k is None and block.kv_layer is None)
        native.opens = int(block.opening is not None)
        native.values_are_keys = int(block.k is not None and block.v is None and block.latent is None)
        native.norm_values = int(block.norm_values)
        qkv = self._packed_apart(heads)
        native.qkv_scale, native.qkv_bias = self._scales(*heads), self._bias(*heads)
        out = self._packed(block.out)
        native.qkv, native.out = described(qkv), described(out)
        native.out_scale, native.out_bias = self._scales(block.out), self._bias(block.out)
        native.window, native.norm_last = block.window, int(block.norm_last)
        native.sinks = self._gain(block.sinks_H)
        if block.rotary is not None:
            native.rot_dim, native.angles = 2 * self._rotaries[block.rotary].half, block.rotary
        native.attention_norm = self._gain(block.attention_norm_D)
        native.attention_end_norm = self._gain(block.attention_end_norm_D)
        native.mlp_end_norm = self._gain(block.mlp_end_norm_D)
        if block.input is not None:
            native.input_gate, native.input_out = (described(self._packed(each)) for each in block.input[:2])
            native.input_norm = self._floats(block.input.norm_D)
        width = int(native.head_dim)
        if block.q_norm_d is not None and block.q_norm_d.dim() == 1 and len(block.q_norm_d) > width:
            native.q_all_norm, native.k_all_norm = self._gain(block.q_norm_d), self._gain(block.k_norm_d)
        else:
            native.q_norm, native.k_norm = (
                None if gain is None or each is None else self._gain(gain.expand(each.outputs // width, width))
                for gain, each in ((block.q_norm_d, block.q), (block.k_norm_d, block.k))
            )
        return qkv, out

    def _inputs(self, inputs: Inputs) -> dict[str, Any]:
        """Fields of the description."""
        table, blocks = _table(inputs.embedding)
        self._keep.append(table := table.detach().contiguous())
        return {
            **structs.same_named(structs.Model, inputs),
            "input_projection": described(self._packed(inputs.projection)),
            "input_embedding": table.data_ptr(),
            "input_embedding_blocks": blocks,
            "input_gain": self._floats(inputs.gain_I),
        }

    def _packed_head(self, head: Projection, layout: Layout) -> Head:
        packed, bias_V = self._packed(head), None
        if head.bias_O is not None:
            bias_V = _padded_bias(head.bias_O)
        return Head(packed, head.outputs, layout.logit_scale, layout.logit_cap, bias_V)

    @torch.no_grad()
    def _packed(self, *projections: Projection) -> Tiles:
        """Projections of the same inputs, packed as one."""
        packed = packed_of([each.weight_OK for each in projections], self._dtype, self.library)
        self._keep.append(packed)
        return packed

    def _packed_apart(self, projections: Sequence[Projection]) -> Tiles | MixedTiles:
        """The same, each in a form of its own."""
        packed = packed_apart([each.weight_OK for each in projections], self._dtype, self.library)
        self._keep.append(packed)
        return packed

    @torch.no_grad()
    def _gates(self, gate: Projection, up: Projection) -> Tiles:
        """Two projections of the same inputs and outputs, packed alike, a tile of each in turn."""
        packed = packed_in_turn(gate.weight_OK, up.weight_OK, self._dtype, self.library)
        self._keep.append(packed)
        return packed

    def _gain(self, gain_D: Tensor | None) -> int | None:
        return None if gain_D is None else self._floats(gain_D)

    def _bias(self, *projections: Projection) -> int | None:
        """Of all outputs, in whole tiles."""
        if all(each.bias_O is None for each in projections):
            return None
        return self._floats(_padded_bias(torch.cat([_bias_of(each) for each in projections])))

    def _scales(self, *projections: Projection) -> int | None:
        """Of all outputs, in whole tiles."""
        if not any(map(_is_scaled, projections)):
            return None
        return self._floats(_padded_bias(torch.cat([_scale_of(each) for each in projections])))

    def _floats(self, values: Tensor) -> int:
        kept = values.detach().to(torch.float32).contiguous()
        self._keep.append(kept)
        return kept.data_ptr()


def _table(embedding: Tensor | StoredWeight | None) -> tuple[Any, int]:
    """The memory of an embedding, and the number of its blocks; 0: it has none."""
    if isinstance(embedding, StoredWeight):
        return embedding.blocks_OR, block_number(embedding.kind.name)
    return embedding, 0


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _padded_bias(bias_O: Tensor, outputs: int = 0) -> Tensor:
    """With zeros up to whole tiles of at least so many outputs."""
    missing = max(outputs, len(bias_O)) - len(bias_O)
    return torch.nn.functional.pad(bias_O.detach().to(torch.float32), (0, missing + -(len(bias_O) + missing) % 16))


def _in_turn(gate_F: Tensor, up_F: Tensor) -> Tensor:
    """A tile of each in turn."""
    return torch.stack([gate_F.view(-1, 16), up_F.view(-1, 16)], dim=1).flatten()


def _is_scaled(projection: Projection) -> bool:
    return isinstance(projection.scale, Tensor) or projection.scale != 1


def _scale_of(projection: Projection) -> Tensor:
    return torch.ones(projection.outputs) * projection.scale


def _bias_of(projection: Projection) -> Tensor:
    if projection.bias_O is None:
        return torch.zeros(projection.outputs)
    return projection.bias_O.detach().to(torch.float32)
