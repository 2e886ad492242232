"""Method `auto` against plain decoding, copying and fixed draft lengths, by kind of text.

    python benchmarks/auto.py --model zoo:smollm2-135m --suite spec_bench.jsonl.gz --limit 4 --json auto.json

The prompts are those of the suite, a kind for each category, and for every second one "Repeat the following text
exactly" with its text (`copies`), and its first --short tokens only (`short`), in one mixed stream. Every group
of --batch prompts goes through all methods one after the other, in an order that rotates, and the engines live through
the whole stream, as a server's does. A ratio is that of tokens per second to plain decoding's on the same prompts: the
median over groups, and the quartiles. With --threads 1 read the ratios of processor time where the machine is shared.
The ratio by counts depends on the load least: the steps of all groups, each at the cost of its rows as the planner's
cost model measured it (foretoken/planner/costs.py), and each draft token at its cost in processor time, in the
stream with the first fixed length of its method; with --batch as if all requests of a step drafted alike. The last
lines are the regret: by counts, the distance of `auto` from the best of all methods for each kind, its mean, and the
least speed of `auto` to plain decoding. --context puts that many tokens before each prompt. FORETOKEN_KEPT_GB=8 lets
`auto` begin with the record of a former run.
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
os.environ.setdefault("FORETOKEN_KEPT_GB", "0")  # engines begin without measurements of a former run

from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.data.prompts import BUNDLED_SUITE, Prompt, limit_per_category, read_prompts
from foretoken.planner import costs as cost_model
from foretoken.planner.trace import record
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
    groups = _groups(options)
    rows = _measure(llm, engines, groups, _costs(llm, groups, options), options)
    for engine in engines.values():
        engine.close()
    Console(width=150).print(_table(rows))
    regret = _regret(rows)
    print("regret of auto by counts: " + ", ".join(f"{kind} {each:.1%}" for kind, each in regret.items()))
    kinds = [row for row in rows if row["method"] == "auto" and row["kind"] != "all"]
    mean = sum(regret[row["kind"]] for row in kinds) / len(kinds)
    least = min(kinds, key=lambda row: row["processor_ratio"])
    print(
        f"mean over kinds {mean:.1%} (aim: 5 %); least speed to plain by processor time "
        f"{least['processor_ratio']:.2f}, {least['kind']} (aim: 0.98)"
    )
    measurement.write(
        {
            "rows": rows,
            "regret_by_counts": regret,
            "mean_regret": round(mean, 4),
            "auto": engines["auto"].recipe.drafter.explanation,
        },
        model=options.model,
        dtype=options.dtype,
        suite=Path(options.suite).name,
        batch=options.batch,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        context=options.context,
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


def _costs(llm: LLM, groups: list[tuple[str, list[Prompt]]], options: argparse.Namespace) -> list[float]:
    """The cost of a step by its draft tokens, in plain steps of as many requests."""
    prompt = llm.chat_prompt([{"role": "user", "content": groups[0][1][0].text}])["prompt_token_ids"]
    trace = record(llm.target, [(0, prompt)], SamplingParams(max_tokens=32, temperature=0.0), 30.0)
    found = cost_model.measure(llm.target, trace, seconds=60.0, contexts=(256,), requests=(options.batch,))
    forward = found.forward[options.batch]
    return [forward(1 + nodes, 256) / forward(1, 256) for nodes in range(17)]


def _before(llm: LLM, groups: list[tuple[str, list[Prompt]]], count: int) -> list[int]:
    """So many tokens of other prompts, as the context that comes before each request."""
    text = " ".join(prompt.text for _, prompts in groups for prompt in prompts)
    ids = llm.tokenizer.encode(text)
    return (ids * (1 + count // len(ids)))[:count]


def _regret(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By kind: how far auto is below the best of all methods, plain decoding included."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        found[row["kind"]][row["method"]] = row["count_ratio"]
    return {kind: round(1.0 - ratios["auto"] / max(ratios.values()), 4) for kind, ratios in found.items()}


def _measure(
    llm: LLM,
    engines: dict[str, LLM],
    groups: list[tuple[str, list[Prompt]]],
    costs: list[float],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row for each kind and method, and of all kinds."""
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    modelled: dict[tuple[str, str], float] = defaultdict(float)  # plain steps, without drafting
    nodes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    spent: dict[str, float] = defaultdict(float)  # processor time
    sources: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    labels = list(engines)
    before = _before(llm, groups, options.context)
    for turn, (kind, prompts) in enumerate(groups):
        asked = [llm.chat_prompt([{"role": "user", "content": each.text}]) for each in prompts]
        if before:  # another part of it for each request, so that no prefix is reused
            asked = [
                {"prompt_token_ids": [*before[(turn + place) % 97 :], *each["prompt_token_ids"]]}
                for place, each in enumerate(asked)
            ]
        most = options.short if kind == SHORT else options.max_tokens
        params = SamplingParams(max_tokens=most, temperature=options.temperature)
        rates = {}
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            began, processor = time.perf_counter(), time.process_time()
            outputs = engines[label].generate(asked, params)
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
            tokens = sum(each.metrics.num_tokens for each in outputs)
            rates[label] = tokens / seconds, tokens / processor
            spent[label] += processor
            for key in ((kind, label), ("all", label)):
                steps = sum(each.metrics.num_steps for each in outputs)
                drafted = sum(each.metrics.num_draft_tokens for each in outputs)
                counts[key] = [old + new for old, new in zip(counts[key], (tokens, steps, drafted), strict=True)]
                for each in outputs:
                    drafts = [costs[min(nodes, 16)] for nodes, _ in each.metrics.drafts]
                    modelled[key] += sum(drafts) + each.metrics.num_steps - len(drafts)
                    named = each.metrics.drafted_by_source or {label.split()[0]: each.metrics.num_draft_tokens}
                    for source, count in named.items():
                        nodes[key][source] = nodes[key].get(source, 0) + count
                    for source, count in each.metrics.accepted_by_source.items():
                        sources[key][source] = sources[key].get(source, 0) + count
        for label in labels:
            pair = rates[label][0] / rates[PLAIN][0], rates[label][1] / rates[PLAIN][1]
            for key in ((kind, label), ("all", label)):
                ratios[key].append(pair)
    plain_step = spent[PLAIN] / counts["all", PLAIN][1]
    prices = {}
    for label in labels:
        method, _, length = label.partition(" ")
        if length == str(options.lengths[0]) and nodes["all", label].get(method):
            drafting = spent[label] / plain_step - modelled["all", label]
            prices[method] = max(0.0, drafting) / nodes["all", label][method]
    whole = {
        key: modelled[key] + sum(prices.get(source, 0.0) * count for source, count in nodes[key].items())
        for key in ratios
    }
    return [_row(*key, found, counts[key], whole[key], sources[key]) for key, found in ratios.items()]


def _row(
    kind: str,
    label: str,
    found: list[tuple[float, float]],
    counts: list[int],
    plain_steps: float,
    sources: dict[str, int],
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
        "count_ratio": round(tokens / plain_steps, 3),
        "tokens_per_step": round(tokens / steps, 3),
        "draft_tokens": drafted,
        "accepted_by_source": sources,
    }


def _quartiles(values: tuple[float, ...]) -> list[float]:
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def _table(rows: list[dict[str, Any]]) -> Table:
    speeds = "speed to none", "by processor time", "by counts"
    table = Table("kind", "method", "groups", *speeds, "tokens/step", "drafted", "accepted")
    for row in sorted(rows, key=lambda each: str(each["kind"])):
        low, high = row["ratio_quartiles"]
        least, most = row["processor_ratio_quartiles"]
        table.add_row(
            row["kind"],
            row["method"],
            str(row["groups"]),
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['processor_ratio']:.2f} ({least:.2f} to {most:.2f})",
            f"{row['count_ratio']:.2f}",
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
    parser.add_argument("--context", type=int, default=0, help="tokens of other text before each prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
