"""Dovetail next to other drafters, by task: nodes by measured cost and fixed ones, places, bytes; two devices
simulated.

    python benchmarks/dovetail.py --model grown:base:100m --head HEAD [--head concat=OTHER] --json OUT.json

All engines share the loaded target, take turns prompt by prompt, and are timed from the first token on; ratios are
taken within a turn. A head of ``zoo:base`` also serves models grown from it, with the same drafts at the same cost.

Simulated clock: a GPU that drafts so many times faster, next to this CPU. A step takes its drafting over that factor,
its bytes over a bus, and the rest as measured here. **No second device is involved.**
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from foretoken import LLM, SamplingParams
from foretoken.core.provenance import provenance
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken_lab.peers.versions import command

PROMPTS = {
    "arithmetic": "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?",
    "code": "Write a Python function that returns the sum of a list of numbers.",
    "story": "Tell me a short story about a dog who finds a key.",
    "explanation": "Explain in simple words why the sky is blue.",
}
GPU_FACTORS = (1, 3, 10)  # of drafting, simulated
BUS_BYTES, BUS_SECONDS = 12e9, 20e-6  # per second, and for every step


def run(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, float]:
    """One prompt from its first token on."""
    (request,) = llm.new_requests(prompt, params)
    llm.engine.add(request)
    while not request.num_output:
        llm.engine.step()
    before, began = replace(request.metrics), perf_counter()
    while not request.finished:
        llm.engine.step()
    metrics = request.metrics
    names = ("num_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens", "num_moved_bytes", "draft_seconds")
    return {
        "seconds": perf_counter() - began,
        **{each: getattr(metrics, each) - getattr(before, each) for each in names},
    }


def engines_for(base: LLM, heads: Sequence[tuple[str, str]], nodes: Sequence[int]) -> dict[str, LLM]:
    """Label to engine."""

    def dovetail(head: str, count: int | None = None, **options: Any) -> LLM:
        fixed = {} if count is None else {"budget": "fixed", "num_speculative_tokens": count}
        return base.with_method({"method": "dovetail", "head": head, **fixed, **options})

    found = {
        "none": base,
        "ngram": base.with_method({"method": "ngram"}),
        "suffix": base.with_method({"method": "suffix"}),
        "draft_model": base.with_method({"method": "draft_model", "model": "zoo:draft"}),
        "eagle": base.with_method({"method": "eagle"}),
    }
    for name, head in heads:
        found[f"dovetail {name} measured"] = dovetail(head)
        found |= {f"dovetail {name} n={count}": dovetail(head, count) for count in nodes}
    found[f"dovetail {heads[0][0]} thread"] = dovetail(heads[0][1], place="thread")
    return found


def simulated(total: dict[str, float]) -> dict[str, float]:
    """Tokens per second with a drafting device that is so many times faster."""
    rest = total["seconds"] - total["draft_seconds"]
    moved = total["num_moved_bytes"] / BUS_BYTES + total["num_steps"] * BUS_SECONDS
    return {
        f"{factor}x": total["num_tokens"] / (rest + total["draft_seconds"] / factor + moved) for factor in GPU_FACTORS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="grown:base:100m")
    parser.add_argument("--head", action="append", required=True, help="folder, or NAME=folder; several times")
    parser.add_argument("--nodes", default="4,8,16,60", help="fixed numbers, with commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    base = LLM(
        arguments.model, dtype=arguments.dtype, device="cpu", threads=arguments.threads, seed=0, speculative_config=None
    )
    heads = [(name or "head", folder) for name, _, folder in (each.rpartition("=") for each in arguments.head)]
    engines = engines_for(base, heads, [int(each) for each in arguments.nodes.split(",")])
    runs: dict[str, list[dict[str, dict[str, float]]]] = {label: [] for label in engines}
    for repeat in range(arguments.repeats + 1):
        turn: dict[str, dict[str, dict[str, float]]] = {label: {} for label in engines}
        for task, prompt in PROMPTS.items():
            for label, llm in engines.items():
                turn[label][task] = run(llm, prompt, params)
        if repeat:  # in the first turn caches and controllers find their places
            for label, each in turn.items():
                runs[label].append(each)
    results = []
    for label, turns in runs.items():
        sums = [{key: sum(task[key] for task in turn.values()) for key in turn["code"]} for turn in turns]
        plain = [sum(task["seconds"] / task["num_tokens"] for task in turn.values()) for turn in runs["none"]]
        own = [sum(task["seconds"] / task["num_tokens"] for task in turn.values()) for turn in turns]
        ratios = [theirs / ours for theirs, ours in zip(plain, own, strict=True)]
        total = sums[-1]
        row = {
            "recipe": label,
            "tokens_per_second": statistics.median(each["num_tokens"] / each["seconds"] for each in sums),
            "over_none": statistics.median(ratios),
            "over_none_range": [min(ratios), max(ratios)],
            "tokens_per_step": total["num_tokens"] / total["num_steps"],
            "nodes_per_step": total["num_draft_tokens"] / total["num_steps"],
            "bytes_per_step": total["num_moved_bytes"] / total["num_steps"],
            "draft_share": total["draft_seconds"] / total["seconds"],
            "by_task": {
                task: {
                    "tokens_per_step": turns[-1][task]["num_tokens"] / turns[-1][task]["num_steps"],
                    "over_none": statistics.median(
                        plain[task]["seconds"] / turn[task]["seconds"]
                        for plain, turn in zip(runs["none"], turns, strict=True)
                    ),
                }
                for task in PROMPTS
            },
        }
        if total["num_moved_bytes"]:
            row["simulated_tokens_per_second"] = simulated(total)
        results.append(row)
        print(json.dumps(row))
    if arguments.json is not None:
        tables = [llm.recipe.drafter for llm in engines.values() if isinstance(llm.recipe.drafter, DovetailDrafter)]
        facts = provenance(
            [],
            model=arguments.model,
            draft=arguments.draft,
            threads=arguments.threads,
            verification_seconds=next(each.costs.points for each in tables if each.costs is not None),
        )
        facts["command"] = command("dovetail.py")
        arguments.json.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
