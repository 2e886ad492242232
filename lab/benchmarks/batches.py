"""How far after plain decoding does a drafter fall in a batch, where drafting does not pay?

    python benchmarks/batches.py --data DATA --batch-size 1,8,32 --json batches.json

Chat prompts (the first turns of MT-Bench) through every method, interleaved with plain decoding in one process. Next to
the wall time of a call stands its processor time: on a machine with neighbours it moves less, and one thread at a time
(``--threads 1``) makes the two the same thing. What a fresh engine has to find out counts, but for the few tokens of
the harness's warm-up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.bench.harness import BASELINE, Plan, Sample, measure
from foretoken.core.errors import ForetokenError
from foretoken.data.prompts import Prompt, read_prompts
from foretoken_lab.measurement import Measurement

METHODS = "draft_model,ngram,suffix,kangaroo,del"
PROMPTS = Path("eval", "mt_bench.jsonl.gz")


def main() -> int:
    options = _options()
    measurement = Measurement("batches.py", options.json, threads=options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    short = [each for each in read_prompts(options.data / PROMPTS) if len(each.text) <= options.longest]
    prompts = [replace(each, category="chat") for each in short[: options.prompts]]
    target = LLM(options.model, dtype=options.dtype, threads=options.threads, speculative_config=None).target
    found = []
    for size in options.batch_size:
        found.append(run(target, prompts, size, options))
        console.print(_table(found[-1]))
    measurement.write({"batches": found}, model=options.model, draft=options.draft, dtype=options.dtype)
    return 0


def _options() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--model", default="zoo:base")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--batch-size", type=sizes, default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--longest", type=int, default=400, help="characters of a prompt at most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write everything here")
    return parser.parse_args()


def run(target: Any, prompts: Sequence[Prompt], size: int, options: argparse.Namespace) -> dict[str, Any]:
    """One batch size: a fresh engine for every method, all of them in one interleaved run."""
    engines = {}
    for name in (BASELINE, *options.methods.split(",")):
        config = {"method": name} if name != "draft_model" else {"method": name, "model": options.draft}
        engines[name] = LLM.from_target(target, speculative_config=config, max_num_seqs=size)
    params = SamplingParams(max_tokens=options.max_tokens)
    plan = Plan(
        prompts,
        params,
        repeats=options.repeats,
        batch_size=size,
        chat=True,
        counters={"processor_seconds": time.process_time},
    )
    samples = measure(engines, plan).samples
    by_method = {name: [each for each in samples if each.label == name] for name in engines}
    return {
        "batch_size": size,
        "methods": [_figures(name, mine, by_method[BASELINE], options.repeats) for name, mine in by_method.items()],
    }


def _figures(name: str, mine: Sequence[Sample], plain: Sequence[Sample], repeats: int) -> dict[str, Any]:
    """Speed over plain decoding's in the same repeat, by both clocks: the median, the lowest and the highest."""

    def ratios(seconds: Any) -> list[float]:
        found = []
        for repeat in range(repeats):
            ours, theirs = ([each for each in side if each.repeat == repeat] for side in (mine, plain))
            tokens = [sum(len(each.tokens) for each in side) for side in (ours, theirs)]
            spent = [sum(map(seconds, side)) for side in (ours, theirs)]
            found.append(tokens[0] / spent[0] / (tokens[1] / spent[1]))
        return found

    steps = sum(each.metrics.num_steps for each in mine)
    return {
        "method": name,
        "wall": _spread(ratios(lambda each: each.seconds)),
        "processor": _spread(ratios(lambda each: each.counts["processor_seconds"])),
        "tokens_per_second": sum(len(each.tokens) for each in mine) / sum(each.seconds for each in mine),
        "tokens_per_step": sum(len(each.tokens) for each in mine) / steps,
        "draft_tokens_per_step": sum(each.metrics.num_draft_tokens for each in mine) / steps,
        "draft_share": sum(each.metrics.draft_seconds for each in mine) / sum(each.seconds for each in mine),
        "same_tokens": sum(a.tokens == b.tokens for a, b in zip(mine, plain, strict=True)) / len(mine),
        "failures": sum(each.error is not None for each in mine),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def _table(found: dict[str, Any]) -> Table:
    table = Table(title=f"batch {found['batch_size']}", title_justify="left", header_style="bold")
    table.add_column("method", no_wrap=True)
    for name in ("speed-up", "processor", "tokens/s", "tok/step", "drafted/step", "draft %", "same %", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["methods"]:
        wall, processor = (
            f"{each['median']:.3f} ({each['lowest']:.3f}-{each['highest']:.3f})"
            for each in (row["wall"], row["processor"])
        )
        table.add_row(
            row["method"],
            wall,
            processor,
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_step']:.3f}",
            f"{row['draft_tokens_per_step']:.3f}",
            f"{100 * row['draft_share']:.1f}",
            f"{100 * row['same_tokens']:.0f}",
            str(row["failures"]),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForetokenError as error:
        print(f"batches: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
