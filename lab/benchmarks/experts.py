"""Mixtures of experts: processor time, in turn.

    python benchmarks/experts.py [--threads 1] [--json OUT]
    python benchmarks/experts.py --model zoo:moe [--dtype bfloat16] [--context 256] [--json OUT]

One block of experts with random weights: the library's experts and ours, with 0, 2 and 4 experts of a row that may be
left out; next to the time stands how many experts were read. With ``--model``: a forward of a whole model after cached
rows, all rows' logits wanted, by the native decoder and by our general path; with several threads by the wall's clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from forwards import Decoder, quartiles, without_fused
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.forward.feed_forward import RoutedExperts, stacked, swapped
from foretoken.methods.sparse.feed_forward import Skip, SparseExperts, ratios
from foretoken.models.load import load

_REPEATS = 25
ROWS = (1, 4, 8, 32)
WIDTH, CHANNELS, EXPERTS, CHOSEN = 1024, 512, 32, 8


def experts() -> list[dict[str, Any]]:
    """Milliseconds of a block, and the experts that it read."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=WIDTH,
        moe_intermediate_size=CHANNELS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config).bfloat16().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for weight in block.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5 / weight.shape[-1] ** 0.5)
        block.gate.weight.mul_(4)
        rows_RD = torch.randn(400, WIDTH, generator=generator).bfloat16()
        beta = ratios(block.gate(rows_RD)[1]).median(0).values.tolist()
        weights = block.experts.gate_up_proj, block.experts.down_proj
        size = 3 * CHANNELS * WIDTH
        parts = RoutedExperts(0, block.experts, EXPERTS, CHOSEN, True, stacked(*weights), weights, size, F.silu)
        results = []
        for count in ROWS:
            ours = {m: SparseExperts(parts, Skip(beta, m, "nested", True) if m else None, 0.0) for m in (0, 2, 4)}
            forms = {"library": {}, **{f"m={m}": {block.experts: each} for m, each in ours.items()}}
            seconds: dict[str, list[float]] = {name: [] for name in forms}
            for _ in range(_REPEATS):
                for name, swaps in forms.items():
                    with swapped(swaps):
                        began = time.thread_time()
                        block(rows_RD[None, :count])
                        seconds[name].append(time.thread_time() - began)
            row = {
                "rows": count,
                "milliseconds": {name: 1e3 * median(each) for name, each in seconds.items()},
                "experts_read": {f"m={m}": each.num_needed for m, each in ours.items()},
            }
            results.append(row)
            print(row, flush=True)
    return results


def forwards(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a forward, by implementation and by rows."""
    generator = torch.Generator().manual_seed(0)
    native = Decoder(load(options.model, dtype=options.dtype))
    with without_fused():
        general = Decoder(load(options.model, dtype=options.dtype))
    vocabulary = native.model.vocab_size
    prompt = torch.randint(7, vocabulary, (options.context,), generator=generator).tolist()
    for each in (native, general):
        each.prefill(prompt)
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for rows in ROWS:
        tokens = torch.randint(7, vocabulary, (rows,), generator=generator).tolist()
        for name, decoder in (("native", native), ("general", general)):
            calls[name, rows] = lambda decoder=decoder, tokens=tokens: decoder.forward(tokens, wanted=len(tokens))
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    keys = list(calls)
    for call in calls.values():
        call()
    for turn in range(options.repeats):
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            began = clock()
            calls[key]()
            seconds[key].append(clock() - began)
    found = []
    for rows in ROWS:
        ms = {name: [1e3 * each for each in seconds[name, n]] for name, n in keys if n == rows}
        row = {"rows": rows, "milliseconds": {name: quartiles(each) for name, each in ms.items()}}
        row["general_over_native"] = quartiles([b / a for a, b in zip(ms["native"], ms["general"], strict=True)])
        found.append(row)
        medians = ", ".join(f"{name} {each['median']:.2f}" for name, each in row["milliseconds"].items())
        print(f"{rows} rows: {medians} ms; general / native {row['general_over_native']['median']:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = experts() if options.model is None else forwards(options)
    if options.json:
        facts = provenance([], model=options.model, threads=options.threads)
        facts["command"] = " ".join(["python", "benchmarks/experts.py", *sys.argv[1:]])
        write_whole(options.json, json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
