"""Heads over pairs, drafts over a cache of their own, and a stop rule: for tests of native calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foretoken.core.stop_rule import Outlook, StopRule
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.scylla.network import Scylla
from helpers.golden import tokens_of

HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3": (Eagle, {"draft_vocab_size": 40}),
    "all tokens": (Eagle, {"norm_heads": True, "attention_bias": True}),
    "norms": (Eagle, {"norm_before_residual": True, "norm_output": True}),
    "eagle2 with a bias": (Eagle, {"algorithm": "eagle", "fusion_bias": True}),
    "three layers, few tokens": (Scylla, {"layers": 3, "draft_vocab_size": 40}),
    "two blocks": (Dovetail, {"layers": 2, "fusion": "concat"}),
}
DTYPES = ("float32", "bfloat16")
CAPACITY = 96


class Read:
    """Drafts over a cache of their own: prefixes of some lengths, and rows after them for the first pass."""

    def __init__(self, run: Runner, prefixes: Sequence[int], rows: Sequence[int], seed: int) -> None:
        self.run, self.cache, self.begins = run, KVCache(run.num_layers, 8, CAPACITY), list(prefixes)
        generator = torch.Generator().manual_seed(seed)
        self.first, features = PackedBatch(), []
        for number, (prefix, count) in enumerate(zip(prefixes, rows, strict=True)):
            slot = self.cache.acquire()
            self.cache.reserve(slot, CAPACITY)
            tokens = tokens_of(seed + number, prefix + count, 100)
            g_TW = torch.randn(prefix + count, 64, generator=generator)
            if prefix:
                batch = PackedBatch()
                batch.add_chunk(slot, 0, tokens[:prefix], wanted=0)
                run.forward(batch, self.cache, g_TW[:prefix], top=0)
                self.cache.commit(slot, range(prefix))
            self.first.add_chunk(slot, prefix, tokens[prefix:], wanted=1)
            features.append(g_TW[prefix:])
        self.ends = [prefix + count for prefix, count in zip(prefixes, rows, strict=True)]
        self.g_TW = torch.cat(features)

    def kept(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Keys and values of the read rows, layer by layer."""
        buffers = [each for pair in zip(self.cache.keys, self.cache.values, strict=True) for each in pair]
        return [each[slot, :, :length] for each in buffers if each is not None for slot, length in enumerate(lengths)]


class Hashed(StopRule):
    """Refuses a part of the nodes, and predicts given lengths."""

    def __init__(self, foreseen: Outlook | None) -> None:
        self.foreseen, self.asked = foreseen, list[tuple[float, float, int]]()

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        self.asked.append((reach, confidence, num_nodes))
        return hash((round(1e6 * reach), round(1e6 * confidence), num_nodes)) % 4 > 0

    def outlook(self) -> Outlook | None:
        return self.foreseen
