"""The sparse kernel under Triton's interpreter, next to the gather path and the definition; a process of its own.

    TRITON_INTERPRET=1 python -m helpers.interpreted_kernel CASE...

writes one JSON object: the worst differences of these cases, and those of one case for every planted bug.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.kernels import block_attention, loading
from foretoken.methods.sparse.attention import SparseAttention
from foretoken.methods.sparse.blocks import SETS, BlockRule
from helpers import sparse
from helpers.golden import random_tree
from helpers.interpreted import planted

SCALING = 0.3
CHAIN = TokenTree((1, 2, 3, 4))


@dataclass(frozen=True)
class Case:
    """One layer and a packed batch.

    Attributes:
        shape: G, n, D, Dv.
        requests: committed rows, and the draft after a root.
    """

    shape: tuple[int, int, int, int]
    rule: BlockRule
    requests: tuple[tuple[int, TokenTree], ...]
    dtype: str = "float32"
    seed: int = 0

    def run(self, device: str = "cpu") -> dict[str, float]:
        """Worst differences of the kernel to the gather path and to the definition, and how often it ran."""
        G, n, D, Dv = self.shape
        heads = ((G * n, D), (G, D), (G, Dv))
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def draw(rows: int) -> list[torch.Tensor]:  # as a model hands them over: heads first, but strided
            drawn = (torch.randn(rows, count, width, generator=generator) for count, width in heads)
            return [each.to(device, dtype).transpose(0, 1) for each in drawn]

        cache, batch = KVCache(1, 4, 1024), PackedBatch()
        for prefix, draft in self.requests:
            slot = cache.acquire()
            cache.reserve(slot, prefix)
            before = PackedBatch()
            before.add_chunk(slot, 0, [0] * prefix, wanted=0)
            DensePlan(cache, before).attend(0, *draw(prefix), scaling=1.0)
            cache.commit(slot, range(prefix))
            batch.add_tree(slot, prefix, 0, draft)
            cache.reserve(slot, 1 + len(draft))
        q, k, v = draw(len(batch))
        factory = SparseAttention(self.rule)
        module = loading.kernel(device)
        with mock.patch.object(module, "attend", wraps=module.attend) as launched:
            found = factory(cache, batch).attend(0, q, k, v, scaling=SCALING).double()
        with mock.patch.object(loading, "kernel", return_value=None):
            gathered = factory(cache, batch).attend(0, q, k, v, scaling=SCALING).double()
        defined = []
        keys, values = cache.keys[0], cache.values[0]
        assert keys is not None
        assert values is not None
        for segment in batch.segments:
            rows = q[:, segment.start : segment.start + segment.num_rows].cpu()
            visible = segment.prefix + segment.num_rows
            k_GLD, v_GLD = (each[segment.slot, :, :visible].cpu() for each in (keys, values))
            roots_keys = k_GLD[:, : segment.prefix + 1].float()  # of the prefix and its own
            columns = sparse.kept_columns(rows[:, 0].float(), roots_keys, segment.prefix, self.rule, SCALING)
            defined.append(sparse.attend(rows, k_GLD, v_GLD, segment, columns, SCALING))
        return {
            "gather": _worst(found, gathered),
            "definition": _worst(found.cpu(), torch.cat(defined)),
            "launches": launched.call_count,
        }


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative where the values are larger than 1: 16 bits have no fixed step."""
    error = (found - expected).abs() / expected.abs().clamp(min=1)
    return float(error.nan_to_num(nan=torch.inf).max())


def _drawn(seed: int) -> Case:
    choose = random.Random(seed)
    size = choose.choice([16, 32])
    rule = BlockRule(
        budget=choose.choice([0.1, 0.3, 0.6]),
        dense_below=choose.choice([0, 20]),
        size=size,
        locals=choose.choice([1, 2]),
        sets=SETS[seed % 3],
    )
    requests = tuple(
        (choose.randrange(8, 14) * size + choose.choice([0, 1, choose.randrange(size), size - 1]), draft)
        for draft in (CHAIN, random_tree(seed, choose.randrange(2, 20)), TokenTree(()))
    )
    shape = (
        choose.choice([1, 2, 3]),
        choose.choice([1, 2, 4]),
        *choose.choice([(16, 16), (64, 64), (24, 40), (64, 16)]),
    )
    return Case(shape, rule, requests, seed=seed)


_WIDE = BlockRule(budget=0.5, dense_below=0, size=128, sinks=1, locals=1)  # a block is two tiles
_GLOBAL = BlockRule(budget=0.4, dense_below=0, size=16, sets="global")  # lists of different lengths
_MANY = (520, random_tree(7, 40))  # more folded rows, and more blocks, than one program takes

CASES: dict[str, Case] = {
    **{f"drawn {seed}": _drawn(seed) for seed in range(9)},
    "wide blocks": Case((2, 2, 32, 32), _WIDE, ((700, CHAIN),)),
    "many rows and parts": Case((2, 4, 32, 32), _GLOBAL, (_MANY,)),
    "bfloat16": Case((2, 2, 64, 64), _GLOBAL, ((333, CHAIN), (200, random_tree(7, 20))), "bfloat16"),
    "float16": Case((2, 2, 64, 32), _GLOBAL, ((333, CHAIN), (200, random_tree(7, 20))), "float16"),
}


_PLANTED = Case((2, 2, 16, 24), _GLOBAL, ((331, random_tree(3, 9)),))
BUGS = {  # code of the kernel, and the planted replacement
    "the tree mask is ignored": ("| (seen_MC != 0)", "| (flight_C >= 0)[None, :]"),
    "columns after the last block are lost": ("prefix - whole + in_flight, COLUMNS", "in_flight, COLUMNS"),
    "the next block is read": ("block * SIZE +", "(block + 1) * SIZE +"),
    "lists of all heads begin like the first one's": ("tl.load(starts + g)", "tl.load(starts)"),
    "an older maximum is not rescaled": ("out_MD * old_M[:, None]", "out_MD"),
    "parts count alike": ("tl.exp2(log_P - tl.max(log_P, 0))", "tl.where(log_P == float('-inf'), 0.0, 1.0)"),
    "each part loses its last tile": ("tl.minimum(number * each + each,", "tl.minimum(number * each + each - 1,"),
    "heads of a group are folded wrongly": ("g * repeats + fold_M // num_rows", "g + fold_M // num_rows"),
}


def _multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as bit patterns, and its dot would multiply those: make them numbers first."""
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == interpreter.tl.bfloat16:
            a, b = (builder.cast_impl(each, interpreter.tl.float32) for each in (a, b))
        return multiply(builder, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _with_bug(old: str, new: str) -> dict[str, float]:
    with planted(block_attention, old, new) as kernel, mock.patch.object(loading, "kernel", return_value=kernel):
        return _PLANTED.run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _multiply_bfloat16()
    found = {
        "sound": {name: CASES[name].run() for name in sys.argv[1:]},
        "without a bug": _PLANTED.run(),
        "bugs": {bug: _with_bug(*change) for bug, change in BUGS.items()},
    }
    print(json.dumps(found))
