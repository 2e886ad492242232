"""An adapter and the target's head, over packed rows and a cache of the adapter's own.

Letters: T packed rows, D width.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from foretoken.models.adapter import Adapter
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.fused.decoder import FusedDecoder
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.native import NativePlan
from foretoken.models.span import Span
from foretoken.plans.dense import DensePlan


class AdapterHead:
    """Hidden states of the adapter's depth to logits, in the target's dtype and on its device.

    Args:
        target: whose head it is; with a fused decoder, the adapter is fused too.
        adapter: copied.
    """

    def __init__(self, target: LanguageModel, adapter: Adapter) -> None:
        self._target = target
        self._fused: FusedDecoder | None = None
        if target.fused is not None:
            self._fused = FusedDecoder(adapter.layout(target.fused.head, target.dtype, target.max_length))
        self._adapter = deepcopy(adapter).to(device=target.device, dtype=target.dtype)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, cache: KVCache, hidden_TD: Tensor, *, top: int) -> Output:
        """Logits of the wanted rows; keys and values go into the cache.

        Args:
            batch: packed rows; their tokens do not matter, only positions and segments.
            hidden_TD: what the target gave for these rows at the adapter's depth.
            top: how many tokens of each row to rank.
        """
        if self._fused is not None:
            ranked = self._fused.forward(batch, NativePlan(cache), Span(0, 1, hidden_TD), top=top)
            return Output.ranked(ranked)
        positions = batch.positions_1T(self._target.device)[0]
        y_TD = self._adapter.over_cache(hidden_TD, positions, DensePlan(cache, batch))
        if not batch.wanted:
            return Output.of(y_TD[:0])
        return self._target.score(y_TD[batch.wanted], top=top, final_norm=False)
