"""Drafter and target one after the other, and at the same time: speed, rounds, and a picture of the busy intervals.

    python benchmarks/executors.py --model grown:base:100m --draft zoo:base --json OUT.json --picture OUT.png

Rows: plain decoding, the serial order with the adaptive length and with each fixed one, PEARL likewise, and auto; with
a head of ``foretoken train dovetail`` (--head), Dovetail in the engine's thread and on one next to it. All engines
share the loaded target, take turns prompt by prompt, and are timed from the first token on.

``efficiency`` is the measured speed over that of the recipe's model. A step of the model is as long as the medians of
its parts: one after the other in the serial order and for Dovetail, with a thread that only reads ahead; under PEARL as
long as its longer side. It gives as many tokens as were measured, and under PEARL with a fixed length those of the
closed form (docs/methods/pearl.md), in which every token stands with the measured chance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

from foretoken import LLM, SamplingParams
from foretoken.core.provenance import provenance
from foretoken_lab.peers.versions import command
from foretoken_lab.timeline import Interval, Timeline, watch

PROMPTS = (
    "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?",
    "Write a Python function that returns the sum of a list of numbers.",
    "Tell me a short story about a dog who finds a key.",
    "Explain in simple words why the sky is blue.",
)


def recipes(draft: str, lengths: list[int], head: str | None) -> dict[str, dict[str, Any] | None]:
    """Label to ``speculative_config``."""
    found: dict[str, dict[str, Any] | None] = {"plain": None}
    for executor in ("serial", "pearl"):
        config = {"method": "draft_model", "model": draft, "executor": executor}
        found[executor] = config
        for length in lengths:
            found[f"{executor} n={length}"] = {**config, "num_speculative_tokens": length}
    found["auto"] = {"method": "draft_model", "model": draft, "executor": "auto"}
    if head is not None:
        config = {"method": "dovetail", "head": head}
        found["dovetail"] = config
        for length in lengths:
            fixed = {**config, "budget": "fixed", "num_speculative_tokens": length}
            found |= {f"dovetail n={length}": fixed, f"dovetail thread n={length}": {**fixed, "place": "thread"}}
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


def sides(timeline: Timeline) -> dict[str, float]:
    """Seconds that each was busy in a step: medians."""
    found: dict[str, list[float]] = {}
    for each in timeline.intervals:
        found.setdefault(each.actor, []).append(each.end - each.begin)
    return {who: statistics.median(seconds) for who, seconds in found.items()}


def closed_form(stands: float, length: int) -> float:
    """Tokens of a PEARL step with this chance of acceptance for each token."""
    if stands >= 1:
        return length
    return (1 - stands**length) / ((1 - stands) * (1 - stands**length + stands))


def efficiency(row: dict[str, Any], parts: dict[str, float], length: int | None) -> float:
    """The measured speed over the model's; ``length`` is PEARL's, if it is fixed."""
    if not row["recipe"].startswith("pearl"):
        step, tokens = parts["propose"] + parts["target"] + parts["engine"], row["tokens_per_step"]
    else:
        step = max(parts["drafter"], parts["target"]) + parts["engine"]
        tokens = row["tokens_per_step"] if length is None else closed_form(row["stands"], length)
    return float(row["tokens_per_second"] * step / tokens)


def last_steps(intervals: list[Interval], seconds: float) -> list[Interval]:
    """Those of whole steps, at most so long before the end."""
    until = max(each.end for each in intervals if each.tokens)
    borders = [each.end for each in intervals if each.tokens and each.end >= until - seconds]
    return [each for each in intervals if min(borders) <= each.begin and each.end <= until]


def draw(timelines: dict[str, Timeline], path: Path, seconds: float) -> None:
    """Draw the busy intervals, a panel for each recipe, all on one scale; after each step its number of tokens."""
    from matplotlib import pyplot

    colours = {"target": "#3b6ea5", "drafter": "#e08a2e", "engine": "#4d4d4d"}
    figure, panels = pyplot.subplots(
        len(timelines), 1, figsize=(9, 0.4 + 1.45 * len(timelines)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (label, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        shown = last_steps(timeline.intervals, seconds)
        start, stop = min(each.begin for each in shown), max(each.end for each in shown)
        own_lane = any(each.actor == "drafter" for each in shown)
        names = []
        for place, who in enumerate(colours):
            # a drafter without a lane is busy while the engine's thread asks it
            busy = [each for each in shown if each.actor == ("propose" if who == "drafter" and not own_lane else who)]
            share = sum(each.end - each.begin for each in busy) / (stop - start)
            names.append(f"{who} {share:.0%}")
            axes.barh(place, 1e3 * (stop - start), height=0.7, color="#eeeeee")
            for each in busy:
                left, width = 1e3 * (each.begin - start), 1e3 * (each.end - each.begin)
                axes.barh(place, width, left=left, height=0.7, color=colours[who])
                if each.tokens:
                    axes.text(left + width, -0.62, str(each.tokens), ha="center", va="bottom", fontsize=7)
        tokens = sum(each.tokens for each in shown)
        axes.set_title(f"{label}: {tokens} tokens in {1e3 * (stop - start):.0f} ms", loc="left", fontsize=9)
        axes.set_yticks(range(len(colours)), names, fontsize=8)
        axes.set_ylim(len(colours) - 0.5, -1.0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1, 0].set_xlabel("milliseconds; grey: waiting; numbers: tokens that a step gave")
    figure.savefig(path, dpi=130)


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
    parser.add_argument("--head", help="a folder of foretoken train dovetail")
    parser.add_argument("--picture", type=Path, help="of the last steps of each order, with the first of --lengths")
    parser.add_argument("--milliseconds", type=float, default=60.0, help="that the picture shows of each")
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    base = LLM(
        arguments.model, dtype=arguments.dtype, device="cpu", threads=arguments.threads, seed=0, speculative_config=None
    )
    lengths = [int(each) for each in arguments.lengths.split(",")]
    configs = recipes(arguments.draft, lengths, arguments.head)
    engines = {label: base.with_method(config) for label, config in configs.items()}
    timelines = {label: found for label, llm in engines.items() if (found := watch(llm)) is not None}
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
        row: dict[str, Any] = {
            "recipe": label,
            "tokens_per_second": statistics.median(rates[label]),
            "over_serial": statistics.median(ratios),
            "over_serial_range": [min(ratios), max(ratios)],
            "tokens_per_step": total["tokens"] / total["steps"],
            "draft_tokens": total["draft"],
            "accepted": total["accepted"],
            "stands": total["accepted"] / total["tokens"],  # of tested tokens: a rejected draft also gives one
            "discarded": total["discarded"],
        }
        if label in timelines:
            parts = sides(timelines[label])
            length = (configs[label] or {}).get("num_speculative_tokens")
            row["milliseconds"] = {who: 1e3 * seconds for who, seconds in parts.items()}
            row["efficiency"] = efficiency(row, parts, length)
            if length is not None and label.startswith("pearl"):
                row["tokens_per_step_closed_form"] = closed_form(row["stands"], length)
        results.append(row)
        print(json.dumps(row))
    if arguments.picture is not None:
        labels = [f"{order} n={lengths[0]}" for order in ("serial", "pearl", "dovetail", "dovetail thread")]
        shown = {label: timelines[label] for label in labels if label in timelines}
        draw(shown, arguments.picture, 1e-3 * arguments.milliseconds)
    if arguments.json is not None:
        facts = provenance(
            [],
            model=arguments.model,
            draft=arguments.draft,
            threads=arguments.threads,
            auto=getattr(engines["auto"].engine.executor, "explanation", ""),
        )
        facts["command"] = command("executors.py")
        arguments.json.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
