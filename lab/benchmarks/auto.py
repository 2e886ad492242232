"""Method `auto` against plain decoding, copying and fixed draft lengths, by kind of text.

    python benchmarks/auto.py --model zoo:smollm2-135m --suite spec_bench.jsonl.gz --limit 4 --json auto.json

The prompts are those of the suite, a kind for each category, and for every second one "Repeat the following text
exactly" with its text (`copies`), and its first --short tokens only (`short`), in one mixed stream. Every group
of --batch prompts goes through all methods one after the other, in an order that rotates, and the engines live through
the whole stream, as a server's does. A ratio is that of tokens per second to plain decoding's on the same prompts: the
median over groups, and the quartiles. With --threads 1 read the ratios of processor time where the machine is shared.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.data.prompts import BUNDLED_SUITE, Prompt, limit_per_category, read_prompts
from foretoken_lab.measurement import Measurement

COPIES, SHORT, PLAIN = "copies", "short", "none"


def main() -> int:
    options = _options()
    measurement = Measurement("auto.py", options.json, threads=options.threads)
    llm = LLM(
        options.model, dtype=options.dtype, threads=options.threads, speculative_config=None, max_num_seqs=options.batch
    )
    engines = {name: llm.with_method(config) for name, config in _recipes(options).items()}
    print(f"auto: {engines['auto'].recipe.drafter.explanation}")
    rows = _measure(llm, engines, _groups(options), options)
    Console(width=150).print(_table(rows))
    measurement.write(
        {"rows": rows, "auto": engines["auto"].recipe.drafter.explanation},
        model=options.model,
        dtype=options.dtype,
        suite=Path(options.suite).name,
        batch=options.batch,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
    )
    return 0


def _recipes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    model = {} if options.draft_model is None else {"model": options.draft_model}
    recipes: dict[str, dict[str, Any]] = {PLAIN: {"method": PLAIN}, "auto": {"method": "auto", **model}}
    recipes["suffix"] = {"method": "suffix"}
    for length in options.lengths:
        recipes[f"suffix {length}"] = {"method": "suffix", "num_speculative_tokens": length}
        if model:
            recipes[f"draft_model {length}"] = {"method": "draft_model", "num_speculative_tokens": length, **model}
    return recipes


def _groups(options: argparse.Namespace) -> list[tuple[str, list[Prompt]]]:
    """The stream: groups of prompts of one kind, in mixed order."""
    prompts = limit_per_category(read_prompts(Path(options.suite)), options.limit)
    kinds: dict[str, list[Prompt]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        kinds[prompt.category or "prompts"].append(prompt)
        if number % 2 == 0:
            text = " ".join(prompt.text.split()[:120])
            kinds[COPIES].append(replace(prompt, text=f"Repeat the following text exactly: {text}"))
            kinds[SHORT].append(prompt)
    groups = [
        (kind, every[first : first + options.batch])
        for kind, every in kinds.items()
        for first in range(0, len(every), options.batch)
    ]
    random.Random(0).shuffle(groups)
    return groups * options.repeats


def _measure(
    llm: LLM, engines: dict[str, LLM], groups: list[tuple[str, list[Prompt]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each kind and method, and of all kinds."""
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    sources: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    labels = list(engines)
    for turn, (kind, prompts) in enumerate(groups):
        asked = [llm.chat_prompt([{"role": "user", "content": each.text}]) for each in prompts]
        most = options.short if kind == SHORT else options.max_tokens
        params = SamplingParams(max_tokens=most, temperature=options.temperature)
        rates = {}
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            began, processor = time.perf_counter(), time.process_time()
            outputs = engines[label].generate(asked, params)
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
            tokens = sum(each.metrics.num_tokens for each in outputs)
            rates[label] = tokens / seconds, tokens / processor
            for key in ((kind, label), ("all", label)):
                steps = sum(each.metrics.num_steps for each in outputs)
                drafted = sum(each.metrics.num_draft_tokens for each in outputs)
                counts[key] = [old + new for old, new in zip(counts[key], (tokens, steps, drafted), strict=True)]
                for each in outputs:
                    for source, count in each.metrics.accepted_by_source.items():
                        sources[key][source] = sources[key].get(source, 0) + count
        for label in labels:
            pair = rates[label][0] / rates[PLAIN][0], rates[label][1] / rates[PLAIN][1]
            for key in ((kind, label), ("all", label)):
                ratios[key].append(pair)
    return [_row(*key, found, counts[key], sources[key]) for key, found in ratios.items()]


def _row(
    kind: str, label: str, found: list[tuple[float, float]], counts: list[int], sources: dict[str, int]
) -> dict[str, Any]:
    clock, processor = ([round(each, 3) for each in _quartiles(column)] for column in zip(*found, strict=True))
    tokens, steps, drafted = counts
    return {
        "kind": kind,
        "method": label,
        "groups": len(found),
        "ratio": clock[1],
        "ratio_quartiles": [clock[0], clock[2]],
        "processor_ratio": processor[1],
        "processor_ratio_quartiles": [processor[0], processor[2]],
        "tokens_per_step": round(tokens / steps, 3),
        "draft_tokens": drafted,
        "accepted_by_source": sources,
    }


def _quartiles(values: tuple[float, ...]) -> list[float]:
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "kind", "method", "groups", "speed to none", "by processor time", "tokens/step", "drafted", "accepted"
    )
    for row in sorted(rows, key=lambda each: str(each["kind"])):
        low, high = row["ratio_quartiles"]
        least, most = row["processor_ratio_quartiles"]
        table.add_row(
            row["kind"],
            row["method"],
            str(row["groups"]),
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['processor_ratio']:.2f} ({least:.2f} to {most:.2f})",
            f"{row['tokens_per_step']:.2f}",
            str(row["draft_tokens"]),
            ", ".join(f"{name} {count}" for name, count in row["accepted_by_source"].items()),
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:base")
    parser.add_argument("--draft-model", help="of auto, and measured alone with the fixed lengths")
    parser.add_argument("--suite", default=str(BUNDLED_SUITE), help="prompts; a category is a kind of text")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each category")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], default=[4, 7])
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--repeats", type=int, default=1, help="times that the stream is repeated")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--short", type=int, default=16, help="tokens of short answers")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
