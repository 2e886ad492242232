"""Drafter and target one after the other, and at the same time: speed, rounds, and a picture of who was busy when.

    python benchmarks/executors.py --model grown:base:100m --draft zoo:base --json OUT.json --picture OUT.png

Rows: plain decoding, the serial order with the adaptive length and with each fixed one, PEARL likewise, and auto. All
engines share the loaded target, take turns prompt by prompt, and are timed from the first token on. ``efficiency`` is
the measured speed of PEARL over that of its model: tokens per step as measured, a step as long as its longer side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.timeline import Interval, Timeline

PROMPTS = (
    "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?",
    "Write a Python function that returns the sum of a list of numbers.",
    "Tell me a short story about a dog who finds a key.",
    "Explain in simple words why the sky is blue.",
)


def recipes(draft: str, lengths: list[int]) -> dict[str, dict[str, Any] | None]:
    """Label to ``speculative_config``."""
    found: dict[str, dict[str, Any] | None] = {"plain": None}
    for executor in ("serial", "pearl"):
        config = {"method": "draft_model", "model": draft, "executor": executor}
        found[executor] = config
        for length in lengths:
            found[f"{executor} n={length}"] = {**config, "num_speculative_tokens": length}
    found["auto"] = {"method": "draft_model", "model": draft, "executor": "auto"}
    return found


def run(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, float]:
    """One prompt from its first token on."""
    (request,) = llm.new_requests(prompt, params)
    llm.engine.add(request)
    while not request.num_output:
        llm.engine.step()
    began, tokens, steps = perf_counter(), request.num_output, request.metrics.num_steps
    while not request.finished:
        llm.engine.step()
    seconds = perf_counter() - began
    metrics = request.metrics
    return {
        "seconds": seconds,
        "tokens": request.num_output - tokens,
        "steps": metrics.num_steps - steps,
        "draft": metrics.num_draft_tokens,
        "accepted": metrics.num_accepted_tokens,
        "discarded": metrics.num_discarded_tokens,
    }


def median(timeline: Timeline, who: str) -> float:
    """Seconds that somebody was busy in a step."""
    return statistics.median(each.end - each.begin for each in timeline.intervals if each.who == who)


def draw(intervals: list[Interval], path: Path) -> None:
    """Who was busy when, in milliseconds."""
    from matplotlib import pyplot

    rows = {who: place for place, who in enumerate(("engine", "target", "drafter"))}
    start = min(each.begin for each in intervals)
    figure, axes = pyplot.subplots(figsize=(9, 2.2))
    for each in intervals:
        width, left = 1e3 * (each.end - each.begin), 1e3 * (each.begin - start)
        axes.barh(rows[each.who], width, left=left, height=0.6, color=f"C{rows[each.who]}", edgecolor="white")
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="grown:base:100m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--lengths", default="4", help="fixed draft lengths, with commas")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    base = LLM(arguments.model, dtype=arguments.dtype, device="cpu", threads=arguments.threads, seed=0)
    lengths = [int(each) for each in arguments.lengths.split(",")]
    configs = recipes(arguments.draft, lengths)
    engines = {label: base.with_method(config) for label, config in configs.items()}
    timelines: dict[str, Timeline] = {}
    for label, llm in engines.items():
        if isinstance(llm.engine.executor, OverlappedExecutor):
            llm.engine.executor.timeline = timelines[label] = Timeline()
    rates: dict[str, list[float]] = {label: [] for label in engines}
    totals: dict[str, dict[str, float]] = {}
    for repeat in range(arguments.repeats + 1):
        sums = {label: {"seconds": 0.0, "tokens": 0.0} for label in engines}
        for prompt in PROMPTS:
            for label, llm in engines.items():
                for key, value in run(llm, prompt, params).items():
                    sums[label][key] = sums[label].get(key, 0.0) + value
        if not repeat:  # caches and controllers find their places
            for timeline in timelines.values():
                timeline.intervals.clear()
            continue
        for label, each in sums.items():
            rates[label].append(each["tokens"] / each["seconds"])
            totals[label] = each
    results = []
    for label in engines:
        total = totals[label]
        ratios = [rate / serial for rate, serial in zip(rates[label], rates["serial"], strict=True)]
        row = {
            "recipe": label,
            "tokens_per_second": statistics.median(rates[label]),
            "over_serial": statistics.median(ratios),
            "over_serial_range": [min(ratios), max(ratios)],
            "tokens_per_step": total["tokens"] / total["steps"],
            "draft_tokens": total["draft"],
            "accepted": total["accepted"],
            "discarded": total["discarded"],
        }
        if label in timelines:
            sides = {who: median(timelines[label], who) for who in ("drafter", "target", "engine")}
            model = row["tokens_per_step"] / (max(sides["drafter"], sides["target"]) + sides["engine"])
            row["milliseconds"] = {who: 1e3 * seconds for who, seconds in sides.items()}
            row["efficiency"] = row["tokens_per_second"] / model
        results.append(row)
        print(json.dumps(row))
    if arguments.picture is not None:
        draw(timelines["pearl"].intervals[-30:], arguments.picture)
    if arguments.json is not None:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        provenance = {
            "command": " ".join([Path(sys.executable).name, *sys.argv]),
            "commit": commit.stdout.strip(),
            "torch": torch.__version__,
            "threads": arguments.threads,
            "machine": platform.processor() or platform.machine(),
            "auto": engines["auto"].engine.executor.explanation,
        }
        arguments.json.write_text(json.dumps({"provenance": provenance, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
