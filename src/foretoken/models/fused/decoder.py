"""The fused CPU decoder: the whole forward of a common decoder in one native call.

For models of a few hundred million parameters most of a small step is the cost of calling hundreds of small kernels.
This path does the same arithmetic (decoder.c) for the anatomy that Llama, Mistral, Qwen2 and Qwen3 share: rotary
attention with grouped queries, RMSNorm, gated SiLU MLP. Weights are packed once; the library's modules keep working
over the same packed memory, so that partial execution and other compute plans still find them.

Letters: T packed rows, K inner dimension, O outputs, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.fused import build
from foretoken.models.native import Blocks, NativePlan
from foretoken.models.span import Span

_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the sequence at hand

_I, _P = ctypes.c_int64, ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("qkv", "out", "gate_up", "down", "qkv_bias", "out_bias")),
        *((name, _P) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", _I),
        ("index", _I),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("bf16", "num_layers", "width", "heads", "kv_heads", "head_dim", "rot_dim", "vocab")),
        *((name, _I) for name in ("qkv_stride", "gate_up_stride", "ffn_units", "logits_stride")),
        ("eps", ctypes.c_double),
        ("scaling", ctypes.c_double),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _P) for name in ("embedding", "head", "final_norm", "cos", "sin")),
        ("own_eps", ctypes.c_float),
        ("own_scaling", ctypes.c_float),
        *((name, _I) for name in ("rows_held", "threads_held")),
        *((f"own_{i}", _P) for i in range(6)),
    ]


class _Segment(ctypes.Structure):
    _fields_ = [*((name, _I) for name in ("slot", "prefix", "tail", "start", "rows", "keep")), ("seen", _P)]


class _Blocks(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("size", "sinks", "locals", "across_heads", "capacity", "most")),
        ("means", ctypes.POINTER(_P)),
        ("chosen", _P),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("num_rows", "num_segments", "num_wanted", "capacity", "threads")),
        *((name, _P) for name in ("tokens", "positions", "wanted")),
        ("segments", ctypes.POINTER(_Segment)),
        ("blocks", ctypes.POINTER(_Blocks)),
        *((name, _P) for name in ("keys", "values", "logits", "best", "peaks")),
        ("top", _I),
        *((name, _P) for name in ("top_ids", "top_shares")),
        *((name, _I) for name in ("first", "last")),
        ("entering", _P),
        *((name, _I) for name in ("skip_norm", "num_taps", "num_tap_rows")),
        *((name, _P) for name in ("taps", "tap_rows", "tapped")),
        ("thresholds", _P),
        ("attention_seconds", ctypes.POINTER(ctypes.c_double)),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("bf16", "tile_stride", "tiles", "units", "rows", "threads")),
        *((name, _P) for name in ("w", "x", "out", "bias")),
    ]


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


@dataclass(frozen=True, slots=True)
class Ranked:
    """What the native forward gives; see models/language_model.py, Output."""

    logits_MV: Tensor
    best: array[int]
    peaks: array[float]
    top_ids: array[int]
    top_shares: array[float]
    hidden: dict[int, Tensor]


class _NativeBlocks(NamedTuple):
    """A description, and the memory that it points to."""

    native: _Blocks
    memory: tuple[object, ...]


@dataclass(frozen=True)
class AttentionLayer:
    """An attention layer without MLP that turns hidden states into what a model's head reads.

    Attributes:
        qkv_OD, out_DI: the projections; queries, keys and values one under another.
        norm_in_D, norm_out_D: weights of the norms before it and behind the sum with what came in.
        cos_Td, sin_Td: rotary tables, float32 [T, head_dim / 2].
        heads, kv_heads, head_dim, norm_eps: its shape.
    """

    qkv_OD: Tensor
    out_DI: Tensor
    norm_in_D: Tensor
    norm_out_D: Tensor
    cos_Td: Tensor
    sin_Td: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float


class FusedDecoder:
    """Native twin of a Hugging Face decoder, or of one attention layer that feeds its head; made by :meth:`of`.

    Args:
        bf16: whether weights, keys and values are bfloat16; float32 otherwise.
    """

    def __init__(self, bf16: bool) -> None:
        found = build.library()
        assert found is not None
        self._library = found
        self._keep: list[Any] = []  # what the native side reads
        self._unit = 2 if bf16 else 1
        self.vocab_size = 0
        self._pointers: tuple[object, Any, Any] = (None, None, None)
        self._model = _Model()

    @classmethod
    def of(cls, model: Any, max_length: int) -> FusedDecoder:
        """The twin of a model; takes over the memory of its linear weights.

        Args:
            model: a causal LM for which :func:`misfit` is None; its ``nn.Linear`` layers are replaced by
                :class:`TiledLinear` over the packed weights.
            max_length: positions to prepare rotary tables for.
        """
        config = model.config
        body = model.model
        bf16 = next(model.parameters()).dtype == torch.bfloat16
        self = cls(bf16)
        head_dim = body.layers[0].self_attn.head_dim
        cos, sin = _rotary_tables(body.rotary_emb, max_length)
        layers = (_Layer * config.num_hidden_layers)()
        self.vocab_size = model.lm_head.weight.shape[0]
        with torch.no_grad():
            for index, layer in enumerate(body.layers):
                self._pack_layer(layers[index], layer, index, config)
            head = self._packed(model.lm_head.weight)
            embedding = body.embed_tokens.weight.detach().contiguous()
            model.lm_head = TiledLinear(self, head, self.vocab_size, None)
        self._keep += [embedding, layers]
        self._model = _Model(
            bf16=int(bf16),
            num_layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rot_dim=2 * cos.shape[1],
            vocab=self.vocab_size,
            qkv_stride=(config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim,
            gate_up_stride=2 * config.intermediate_size,
            ffn_units=config.intermediate_size // self._unit,
            logits_stride=head.shape[0] * 16,
            eps=config.rms_norm_eps,
            scaling=body.layers[0].self_attn.scaling,
            layers=layers,
            embedding=embedding.data_ptr(),
            head=head.data_ptr(),
            final_norm=self._floats(body.norm.weight),
            cos=self._floats(cos),
            sin=self._floats(sin),
        )
        return self

    def with_layer(self, layer: AttentionLayer) -> FusedDecoder:
        """A layer and this model's head as a decoder of one layer without MLP; every forward of it is entered."""
        bf16 = bool(self._model.bf16)
        twin = FusedDecoder(bf16)
        dtype = torch.bfloat16 if bf16 else torch.float32
        layers = (_Layer * 1)()
        with torch.no_grad():
            layers[0].qkv = twin._packed(layer.qkv_OD.to(dtype)).data_ptr()
            layers[0].out = twin._packed(layer.out_DI.to(dtype)).data_ptr()
            layers[0].attention_norm = twin._floats(layer.norm_in_D)
        twin._keep += [self, layers]
        twin.vocab_size = self.vocab_size
        twin._model = _Model(
            bf16=int(bf16),
            num_layers=1,
            width=len(layer.norm_in_D),
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            rot_dim=layer.head_dim,
            vocab=self.vocab_size,
            qkv_stride=len(layer.qkv_OD),
            gate_up_stride=32,  # no MLP: the least that can be allocated
            ffn_units=32,
            logits_stride=self._model.logits_stride,
            eps=layer.norm_eps,
            scaling=layer.head_dim**-0.5,
            layers=layers,
            embedding=None,
            head=self._model.head,
            final_norm=twin._floats(layer.norm_out_D),
            cos=twin._floats(layer.cos_Td),
            sin=twin._floats(layer.sin_Td),
        )
        return twin

    def forward(self, batch: PackedBatch, plan: NativePlan, span: Span, *, top: int) -> Ranked:
        """Compute the plan, the batch's rows written into its cache; hidden states are float32."""
        cache = plan.cache
        segments = (_Segment * len(batch.segments))()
        for native, segment in zip(segments, batch.segments, strict=True):
            native.slot, native.prefix, native.tail = segment.slot, segment.prefix, segment.tail
            native.start, native.rows = segment.start, segment.num_rows
            if segment.seen is not None:
                native.seen = segment.seen.data_ptr()
        keys, values = self._cache_pointers(cache) if span.first < span.last else (None, None)
        blocks, attention = None, ctypes.c_double(0)
        if plan.blocks is not None:
            for native, keep in zip(segments, plan.blocks.keep, strict=True):
                native.keep = keep
            blocks = self._blocks(plan.blocks, batch, span)
        tokens, positions, wanted = array("i", batch.tokens), array("i", batch.positions), array("i", batch.wanted)
        num_wanted = len(wanted)
        logits_MV = torch.empty(num_wanted, self._model.logits_stride)
        best, peaks = array("i", bytes(4 * num_wanted)), array("f", bytes(4 * num_wanted))
        ids, shares = array("i", bytes(4 * num_wanted * top)), array("f", bytes(4 * num_wanted * top))
        thresholds = array("f", plan.thresholds or ())
        entering_TD = None if span.entering_TD is None else span.entering_TD.contiguous()
        taps = array("q", span.taps)
        tap_rows = array("i", range(len(tokens)) if span.tap_rows is None else span.tap_rows)
        tapped = torch.empty(len(taps), len(tap_rows), self._model.width)
        call = _Call(
            num_rows=len(tokens),
            num_segments=len(segments),
            num_wanted=num_wanted,
            capacity=cache.capacity,
            threads=torch.get_num_threads(),
            tokens=tokens.buffer_info()[0],
            positions=positions.buffer_info()[0],
            wanted=wanted.buffer_info()[0],
            segments=segments,
            blocks=None if blocks is None else ctypes.pointer(blocks.native),
            keys=keys,
            values=values,
            logits=logits_MV.data_ptr(),
            best=best.buffer_info()[0],
            peaks=peaks.buffer_info()[0],
            top=top,
            top_ids=ids.buffer_info()[0],
            top_shares=shares.buffer_info()[0],
            first=span.first,
            last=span.last,
            entering=None if entering_TD is None else entering_TD.data_ptr(),
            skip_norm=int(not span.final_norm),
            num_taps=len(taps),
            num_tap_rows=len(tap_rows),
            taps=taps.buffer_info()[0],
            tap_rows=tap_rows.buffer_info()[0],
            tapped=tapped.data_ptr(),
            thresholds=thresholds.buffer_info()[0] if plan.thresholds else None,
            attention_seconds=None if plan.clock is None else ctypes.pointer(attention),
        )
        self._library.foretoken_forward(ctypes.byref(self._model), ctypes.byref(call))
        if plan.clock is not None:
            plan.clock.attention_seconds += attention.value
        hidden = {depth: tapped[place] for place, depth in enumerate(span.taps)}
        return Ranked(logits_MV[:, : self.vocab_size], best, peaks, ids, shares, hidden)

    def _blocks(self, blocks: Blocks, batch: PackedBatch, span: Span) -> _NativeBlocks:
        """What the native side needs in order to select: means for the layers that do, room for what they take."""
        layers = self._model.layers
        means: dict[int, Tensor] = {}
        for index in range(span.first, span.last):
            layer = layers[index]
            if not layer.window and (not means or blocks.selects(layer.index)):
                means[layer.index] = blocks.means(layer.index)
        pointers = (_P * self._model.num_layers)()
        for number, each in means.items():
            pointers[number] = each.data_ptr()
        most = max(segment.prefix // blocks.size for segment in batch.segments)
        chosen = array("i", bytes(4 * len(batch.segments) * self._model.kv_heads * (1 + most)))
        native = _Blocks(
            size=blocks.size,
            sinks=blocks.sinks,
            locals=blocks.locals,
            across_heads=int(blocks.across_heads),
            capacity=next((each.shape[2] for each in means.values()), 0),
            most=most,
            means=pointers,
            chosen=chosen.buffer_info()[0],
        )
        return _NativeBlocks(native, (pointers, chosen, means))

    def linear(self, packed: Tensor, x_TK: Tensor, bias: int | None) -> Tensor:
        """[T, K] times packed weights [tiles, K / unit, 16, unit] -> float32 [T, tiles * 16]."""
        x_TK = x_TK.contiguous()
        out = torch.empty(x_TK.shape[0], packed.shape[0] * 16)
        call = _Linear(
            bf16=self._model.bf16,
            tile_stride=packed.stride(0) // self._unit,
            tiles=packed.shape[0],
            units=packed.shape[1],
            rows=x_TK.shape[0],
            threads=torch.get_num_threads(),
            w=packed.data_ptr(),
            x=x_TK.data_ptr(),
            out=out.data_ptr(),
            bias=bias,
        )
        self._library.foretoken_linear(ctypes.byref(call))
        return out

    def __del__(self, _byref: Any = ctypes.byref) -> None:  # the module may be gone before its last decoder is
        model = getattr(self, "_model", None)
        if model is not None:
            self._library.foretoken_free(_byref(model))

    # ------------------------------------------------------------------ packing

    def _pack_layer(self, native: _Layer, layer: Any, index: int, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        qkv = self._packed(torch.cat([each.weight for each in projections]))
        qkv_bias = None
        if any(each.bias is not None for each in projections):
            parts = [
                each.weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in projections
            ]
            qkv_bias = self._floats(torch.cat(parts))
        out = self._packed(attention.o_proj.weight)
        out_bias = None if attention.o_proj.bias is None else self._floats(attention.o_proj.bias)
        gate, up = _tiled(mlp.gate_proj.weight, self._unit), _tiled(mlp.up_proj.weight, self._unit)
        gate_up = torch.stack([gate, up], dim=1).flatten(0, 1).contiguous()
        self._keep.append(gate_up)
        down = self._packed(mlp.down_proj.weight)

        native.index = index
        native.qkv, native.out = qkv.data_ptr(), out.data_ptr()
        native.gate_up, native.down = gate_up.data_ptr(), down.data_ptr()
        native.qkv_bias, native.out_bias = qkv_bias, out_bias
        native.attention_norm = self._floats(layer.input_layernorm.weight)
        native.mlp_norm = self._floats(layer.post_attention_layernorm.weight)
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            setattr(native, name, None if norm is None else self._floats(norm.weight))
        native.window = getattr(attention, "sliding_window", None) or 0
        if config.model_type == "mistral":
            native.window = getattr(config, "sliding_window", None) or 0

        start = 0
        for name, each in zip(("q_proj", "k_proj", "v_proj"), projections, strict=True):
            tiles = each.out_features // 16
            bias = None if qkv_bias is None else qkv_bias + start * 64
            setattr(attention, name, TiledLinear(self, qkv[start : start + tiles], each.out_features, bias))
            start += tiles
        attention.o_proj = TiledLinear(self, out, config.hidden_size, out_bias)
        mlp.gate_proj = TiledLinear(self, gate_up[0::2], config.intermediate_size, None)
        mlp.up_proj = TiledLinear(self, gate_up[1::2], config.intermediate_size, None)
        mlp.down_proj = TiledLinear(self, down, config.hidden_size, None)

    def _packed(self, weight_OK: Tensor) -> Tensor:
        packed = _tiled(weight_OK.detach(), self._unit).contiguous()
        self._keep.append(packed)
        return packed

    def _floats(self, values: Tensor) -> int:
        kept = values.detach().to(torch.float32).contiguous()
        self._keep.append(kept)
        return kept.data_ptr()

    def _cache_pointers(self, cache: KVCache) -> tuple[Any, Any]:
        """Addresses of the layers' buffers; taken again when the cache has grown."""
        key = (cache.serial, cache.generation)
        if self._pointers[0] != key:
            model = self._model
            dtype = torch.bfloat16 if model.bf16 else torch.float32
            row = torch.empty(model.kv_heads, 0, model.head_dim, dtype=dtype)
            buffers = [cache.buffers(layer, row, row) for layer in range(model.num_layers)]
            kind = _P * len(buffers)
            keys = kind(*(pair[0].data_ptr() for pair in buffers))
            values = kind(*(pair[1].data_ptr() for pair in buffers))
            key = (cache.serial, cache.generation)
            self._pointers = (key, keys, values)
        _, keys, values = self._pointers
        return ctypes.cast(keys, _P), ctypes.cast(values, _P)


class TiledLinear(nn.Module):
    """``nn.Linear`` over weights that the fused decoder has packed: the library's layers keep working.

    Args:
        owner: the decoder whose packed memory this reads.
        packed: [tiles, K / unit, 16, unit], possibly every other tile of a larger pack.
        out_features: outputs; the last tile may be padded.
        bias: address of float32 biases, or None.
    """

    def __init__(self, owner: FusedDecoder, packed: Tensor, out_features: int, bias: int | None) -> None:
        super().__init__()
        self._owner = (owner,)  # a tuple, so that nn.Module does not look inside
        self._packed = packed
        self._bias = bias
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., O]"""
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = self._owner[0].linear(self._packed, flat, self._bias)[:, : self.out_features].to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


def _tiled(weight_OK: Tensor, unit: int) -> Tensor:
    """[O, K] -> [O / 16, K / unit, 16, unit]; O is padded with zeros to a whole tile."""
    outputs, inner = weight_OK.shape
    padded = -(-outputs // 16) * 16
    if padded != outputs:
        weight_OK = torch.cat([weight_OK, weight_OK.new_zeros(padded - outputs, inner)])
    return weight_OK.view(padded // 16, 16, inner // unit, unit).permute(0, 2, 1, 3)


def _rotary_tables(rotary: Any, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the library's own rotary module, float32 [length, rot_dim / 2]."""
    positions = torch.arange(length)[None]
    cos, sin = rotary(torch.zeros(1, 1, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
