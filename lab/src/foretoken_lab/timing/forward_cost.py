"""What a verification forward has to compute and to read: arithmetic on shapes, not a measurement.

    attention of a layer, per row     2 H (D + Dv) columns             scores and weighted values
    selection of a layer, per step    2 H D columns                    exact, where it selects; methods/sparse/blocks.py
                                      2 G D blocks                     by means; by bounds twice that
    everything else, per row          2 parameters                     head included, table of embeddings not

Bytes are those read from memory once a step: the parameters, the keys and values of the columns that are read, and the
scores of blocks: their means or bounds, or the keys that attention leaves out. Of experts that are routed, the
products count those of a row, the bytes all of them. What sparse MLPs and experts leave out depends on the text and is
not counted: there both are upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.feed_forward import routed_experts
from foretoken.forward.ssm.state import cache_for
from foretoken.methods.sparse.attention import SparseAttention
from foretoken.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class Cost:
    """One forward of one segment.

    Attributes:
        flops: of everything.
        attention_flops: of attention and of selecting.
        bytes: read once.
        read: mean share of the prefix that a layer's heads read.
    """

    flops: int
    attention_flops: int
    bytes: int
    read: float


@dataclass(frozen=True, slots=True)
class _Layer:
    heads: int
    groups: int
    width: int
    value_width: int
    window: int | None


class AttentionShapes:
    """The attention of a model's layers, as they call it: found by one forward.

    Args:
        model: to measure.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.layers: dict[int, _Layer] = {}
        cache = cache_for(model.mixers, model.num_layers, 1, model.max_length, model.dtype, model.device)
        batch = PackedBatch()
        batch.add_chunk(cache.acquire(), 0, [0], wanted=1)
        model.forward(batch, _Noting(cache, batch, self.layers))

    def _row_bytes(self, layer: _Layer) -> int:
        """Of a key and a value of one head: elements, or codes with a scale each."""
        width = layer.width + layer.value_width
        return (
            width + 8
            if self.model.kv_cache_dtype == "int8"
            else width * (self.model.kv_dtype or self.model.dtype).itemsize
        )

    def cost(self, prefix: int, rows: int, sparse: SparseAttention | None) -> Cost:
        """Of a root and a chain after ``prefix`` rows; ``sparse``: dense attention if None."""
        element = self.model.dtype.itemsize
        attention = memory = 0
        shares = []
        selected = False
        for number, layer in self.layers.items():
            seen, blocks = _columns(layer, prefix, sparse)
            shares.append(seen / prefix)
            behind = rows * (rows + 1) // 2  # of the rows in flight, each sees itself and those before it
            attention += 2 * layer.heads * (layer.width + layer.value_width) * (rows * seen + behind)
            memory += layer.groups * (seen + rows) * self._row_bytes(layer)
            if sparse is not None and blocks and (not selected or sparse.selects(number)):
                selected = True
                products, numbers = _selection(layer, prefix, seen, blocks, sparse.rule.score)
                attention += products * (sparse.rule.num_voters(rows) if sparse.rule.score == "exact" else 1)
                memory += numbers * (element if sparse.rule.score == "exact" else 4)
        total = attention + 2 * rows * _met(self.model)
        return Cost(total, attention, memory + self.model.weight_bytes, sum(shares) / len(shares))


class _Noting(DensePlan):
    """Dense attention, called layer by layer, that records the calling layer."""

    def __init__(self, cache: KVCache, batch: PackedBatch, layers: dict[int, _Layer]) -> None:
        super().__init__(cache, batch)
        cache.reserve(batch.segments[0].slot, len(batch))
        self.native = None
        self._layers = layers

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **options: Any) -> Tensor:
        heads, groups, width, value_width = len(q_HTD), len(k_GTD), q_HTD.shape[-1], v_GTD.shape[-1]
        self._layers[layer] = _Layer(heads, groups, width, value_width, options.get("window"))
        return super().attend(layer, q_HTD, k_GTD, v_GTD, **options)


def _columns(layer: _Layer, prefix: int, sparse: SparseAttention | None) -> tuple[int, int]:
    """Columns of the prefix that a head reads, on average, and blocks that it chose from (0: it did not choose)."""
    if layer.window is not None:
        return min(prefix, layer.window), 0
    keep = 0 if sparse is None else sparse.rule.keep(prefix, layer.groups)
    if sparse is None or not keep:
        return prefix, 0
    blocks, size = sparse.rule.num_blocks(prefix), sparse.rule.size
    return keep * size // layer.groups + prefix - blocks * size, blocks


def _selection(layer: _Layer, prefix: int, seen: int, blocks: int, score: str) -> tuple[int, int]:
    """Products, and numbers read next to the columns that attention reads anyway."""
    if score == "exact":
        return 2 * layer.heads * layer.width * prefix, layer.groups * layer.width * (prefix - seen)
    numbers = layer.groups * layer.width * blocks * (2 if score == "bounds" else 1)
    return 2 * numbers, numbers


def _met(model: LanguageModel) -> int:
    """Parameters that a row is multiplied with."""
    met = model.num_parameters
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        met -= model.model.get_input_embeddings().weight.numel()
    return met - sum((each.num_experts - each.num_chosen) * each.size for each in routed_experts(model.model))
