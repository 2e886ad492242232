"""A prompt into a cache, outside of the engine: a few hundred rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.dense import DensePlan
from foretoken.models.language_model import LanguageModel

_CHUNK_ROWS = 512  # rows of one forward


def prefill(model: LanguageModel, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
    """Read tokens behind what the slot holds, and commit them."""
    for begin in range(0, len(tokens), _CHUNK_ROWS):
        chunk = tokens[begin : begin + _CHUNK_ROWS]
        cache.reserve(slot, len(chunk))
        batch = PackedBatch()
        batch.add_chunk(slot, cache.lengths[slot], chunk, wanted=1)
        model.forward(batch, DensePlan(cache, batch))
        cache.commit(slot, range(len(chunk)))
