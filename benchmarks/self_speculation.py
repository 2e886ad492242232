"""Self-speculation in one run: plain decoding, other drafters, Kangaroo, and DEL against every static pair.

    python benchmarks/self_speculation.py --target zoo:base-ee --suite FILE [--choose-on FILE] [--methods A,B,...]
                                          [--exits 2,4,6,8 --lengths 2,4,6] [--json OUT]

Methods are written as for ``foretoken bench``: ``kangaroo+tree=true,del+reread_every=4``. With --choose-on, first every
static pair (exit layer, draft length) runs on those prompts, and the fastest one on the mean over categories is then
measured on --suite beside the methods, with the three next best. Figures are those of ``foretoken bench``; beside them
stand layers of the target loaded per token (head and adapter not counted) and milliseconds of drafting a draft token.
The ratio is that of the summed times of a repeat; its range is over repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.bench.harness import Method, Plan, measure
from foretoken.bench.summary import summarise
from foretoken.bench.workloads import Prompt, read_prompts
from foretoken.cli.settings import parse_methods
from foretoken.core.provenance import provenance

METHODS = "draft_model,ngram,suffix,kangaroo,kangaroo+tree=true,del,del+reread_every=4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:base-ee")
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--choose-on", type=Path)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--draft-model", default="zoo:draft")
    parser.add_argument("--exits", default="1,2,3,4,6,8")
    parser.add_argument("--lengths", default="1,2,4,6")
    parser.add_argument("--limit", type=int, help="first prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = LLM(options.target, dtype=options.dtype, max_num_seqs=8, seed=0)
    found: dict[str, Any] = {
        "provenance": provenance(sys.argv),
        "options": {k: str(v) for k, v in vars(options).items()},
    }

    fixed: list[str] = []
    if options.choose_on:
        pairs = [
            f"del+exit_layer={e}+draft_length={n}" for e in options.exits.split(",") for n in options.lengths.split(",")
        ]
        prompts = _few(read_prompts(options.choose_on), options.limit)
        ranked = sorted(_run(llm, pairs, prompts, options, repeats=1)[1:], key=lambda each: -_mean(each))
        found["fixed"] = ranked
        _show(f"static pairs on {options.choose_on.name}, {len(prompts)} prompts", ranked)
        fixed = [each["method"] for each in ranked[:4]]
    prompts = _few(read_prompts(options.suite), options.limit)
    results = _run(llm, [*options.methods.split(","), *fixed], prompts, options, repeats=options.repeats)
    found["results"] = results
    _show(f"{options.target} on {options.suite.name}, {len(prompts)} prompts", results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _few(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    return [prompt for group in by_category.values() for prompt in group[:limit]]


def _run(llm: LLM, names: Sequence[str], prompts: list[Prompt], options: Any, *, repeats: int) -> list[dict[str, Any]]:
    draft = options.draft_model if any(name.startswith("draft_model") for name in names) else None
    methods: list[Method] = parse_methods(",".join(["none", *names]), [], target=options.target, draft_model=draft)
    engines = {each.label: llm if each.label == "none" else llm.with_method(each.config) for each in methods}
    loaded: dict[str, int] = defaultdict(int)
    before = 0

    def count(label: str) -> None:
        nonlocal before
        loaded[label] += llm.target.layers_loaded - before
        before = llm.target.layers_loaded

    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True, seed=0)
    plan = Plan(prompts, params, repeats=repeats, chat=llm.is_chat_model)
    before = llm.target.layers_loaded
    records = measure(engines, plan, progress=count)
    results = summarise(records, methods)
    for each in results:
        tokens = sum(len(sample.tokens) for sample in records.samples if sample.label == each["method"])
        each["layers_per_token"] = loaded[each["method"]] / tokens
        drafted = each["num_draft_tokens"]
        each["draft_ms_per_token"] = each["time"]["draft"] / drafted * 1e3 if drafted else None
    return results


def _mean(result: dict[str, Any]) -> float:
    """Speed-up, mean over categories."""
    each = [figures["speedup"] for figures in result["by_category"].values()]
    return sum(each) / len(each)


def _show(title: str, results: Sequence[dict[str, Any]]) -> None:
    columns = ("method", "speed-up", "range", "mean of categories", "tok/step", "accepted by position", "layers/token")
    table = Table(title=title)
    for name in (*columns, "ms/draft token", "equal text"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for each in results:
        low, high = each["spread"]["speedup"] or (float("nan"), float("nan"))
        drafting = each["draft_ms_per_token"]
        table.add_row(
            each["method"],
            f"{each['speedup']:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{_mean(each):.2f}",
            f"{each['tokens_per_step']:.2f}",
            " ".join(f"{share:.2f}" for share in each["acceptance_by_position"][:6]),
            f"{each['layers_per_token']:.1f}",
            "-" if drafting is None else f"{drafting:.2f}",
            f"{each['equal_outputs']:.0%}",
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
