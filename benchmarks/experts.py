"""One block of experts with random weights: processor time of the library's experts and of ours, in turn.

    python benchmarks/experts.py [--threads 1] [--json OUT]

Ours runs with 0, 2 and 4 experts of a row that may be left out; beside the time stands how many experts were read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.methods.sparse.feed_forward import Skip, SparseExperts, ratios
from foretoken.models.feed_forward import RoutedExperts, stacked, swapped

_REPEATS = 25
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
        for count in (1, 4, 8, 32):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = experts()
    if options.json:
        facts = provenance([], threads=options.threads)
        facts["command"] = " ".join(["python", "benchmarks/experts.py", *sys.argv[1:]])
        write_whole(options.json, json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
