"""One step of prefix tree attention, and its definition in float64.

Triton is interpreted only where TRITON_INTERPRET=1 was set before it was imported, so a test runs

    TRITON_INTERPRET=1 python -m helpers.prefix_tree

which writes a JSON list: how far the kernel is from the definition for some trees and prefixes, and with a planted bug.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward import prefix_tree_attention
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.kernels import loading

SCALING = 0.3


def some_tree(seed: int) -> TokenTree:
    choose = random.Random(seed)
    count = choose.randrange(1, 20)
    return TokenTree(range(count), [choose.randrange(-1, node) for node in range(count)])


def step(
    prefix: int, draft: TokenTree, *, groups: int, width: int = 16, value: int = 16, seed: int = 0, **scoring: Any
) -> tuple[PackedBatch, KVCache, list[Tensor], dict[str, Any]]:
    """A packed batch of one root and its draft after a committed prefix, and the rows' queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    heads = ((6, width), (groups, width), (groups, value))

    def draw(rows: int) -> list[Tensor]:  # as a model hands them over: heads first, but strided
        return [torch.randn(rows, count, each, generator=generator).transpose(0, 1) for count, each in heads]

    cache, batch = KVCache(1, 1, 1024), PackedBatch()
    slot = cache.acquire()
    if prefix:
        cache.reserve(slot, prefix)
        before = PackedBatch()
        before.add_chunk(slot, 0, [0] * prefix, wanted=0)
        DensePlan(cache, before).attend(0, *draw(prefix), scaling=1.0)
        cache.commit(slot, range(prefix))
    cache.reserve(slot, 1 + len(draft))
    batch.add_tree(slot, prefix, 0, draft)
    return batch, cache, draw(len(batch)), {"scaling": SCALING, **scoring}


def reference(
    segment: Segment, cache: KVCache, q_HRD: Tensor, *, scaling: float, window: int | None = None,
    softcap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition, one softmax over all columns, in float64."""
    keys, values = cache.keys[0], cache.values[0]
    assert keys is not None
    assert values is not None
    H, R, _ = q_HRD.shape
    prefix, end = segment.prefix, segment.prefix + R
    at = torch.arange(end)
    if segment.depths is not None:
        at[prefix:] = prefix + torch.tensor(segment.depths)
    seen = torch.ones(R, end, dtype=torch.bool)
    seen[:, prefix:] = torch.ones(R, R).tril().bool() if segment.seen is None else segment.seen
    if window is not None:
        seen &= at[prefix:, None] - at[None] < window
    k_HLD, v_HLD = (
        each[segment.slot, :, :end].double().repeat_interleave(H // keys.shape[1], 0) for each in (keys, values)
    )
    scores = q_HRD.double() @ k_HLD.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.double()[:, None, None].expand(H, R, 1)], dim=-1)
    return (torch.softmax(scores, -1)[..., :end] @ v_HLD).transpose(0, 1)


def main() -> None:
    kernel = loading.kernel("cpu")
    every = prefix_tree_attention._every_block
    found = []
    for prefix, seed, planted in ((0, 1, False), (1, 2, False), (63, 3, False), (64, 4, False), (65, 5, False),
                                  (300, 6, False), (300, 6, True)):  # fmt: skip
        batch, cache, (q, k, v), scoring = step(prefix, some_tree(seed), groups=2 if seed % 2 else 6, seed=seed)
        with (
            mock.patch.object(kernel, "attend", wraps=kernel.attend) as launched,
            mock.patch.object(
                prefix_tree_attention, "_every_block", lambda k, p, *rest, less=64 * planted: every(k, p - less, *rest)
            ),
        ):
            out = prefix_tree_attention.PrefixTreePlan(cache, batch).attend(0, q, k, v, **scoring)
        worst = float((out - reference(batch.segments[0], cache, q, **scoring)).abs().max())
        found.append({"prefix": prefix, "planted": planted, "launches": launched.call_count, "error": worst})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
