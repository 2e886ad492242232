"""Drafters after long prompts: tokens per step by context, tokens per second without the prompt, memory.

    python benchmarks/long_contexts.py --data DATA --contexts 1000 4000 8000 16000 --limit 2 --json long_contexts.json

Questions about QMSum's meetings (validation and test, which no recipe reads) and hidden keys, after as much text as
the context says. Every prompt goes through all methods one after the other, in an order that rotates; reading it is not
part of the rate. ``draft_model`` is ``zoo:draft``, with a context of 4,096 tokens.

With ``--fill exchanges`` the same questions follow every context, each about the same passage of the smallest
context; what makes a context longer are earlier exchanges about other meetings.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.bench.fields import metrics_fields
from foretoken.core.files import check_writable, write_whole
from foretoken.core.metrics import Metrics
from foretoken.core.provenance import provenance
from foretoken_lab.peers.versions import Quiet, command
from foretoken_lab.tasks import catalog

_TEMPLATE = 64  # tokens that the chat template and the question's own words may add


@dataclass
class Total:
    """One method after one context, over the prompts of a task.

    Attributes:
        metrics: of all requests.
        decoded, seconds: tokens after the first one of each answer, and the time that they took.
        unequal: answers that are not plain decoding's.
        ring: bytes that the drafter holds of its own, where it says so.
    """

    metrics: Metrics = field(default_factory=Metrics)
    decoded: int = 0
    seconds: float = 0.0
    unequal: int = 0
    ring: int | None = None


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    quiet = Quiet()
    if options.json:
        check_writable(options.json, "--json")
    llm = LLM(options.target, dtype=options.dtype, threads=options.threads, speculative_config=None)
    rows = _measure(llm, options)
    for name in options.methods:
        held = {row["drafter_bytes"] for row in rows if row["method"] == name}
        if len(held) > 1:
            raise SystemExit(f"{name} holds {sorted(held)} bytes of its own: they follow the context")
    Console(width=160).print(_table(rows))
    others = quiet.report()
    if options.json:
        facts = provenance(
            [], model=options.target, methods=options.methods, dtype=options.dtype, threads=options.threads
        )
        facts["command"] = command("long_contexts.py")
        facts["share_of_processors_used_by_others"] = others
        write_whole(options.json, json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")
    return 0


def _methods(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    head = {} if options.head is None else {"head": str(options.head)}
    known: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "draft_model": {"method": "draft_model", "model": "zoo:draft"},
        "longspec": {"method": "longspec", **head},
        "longspec, tree": {"method": "longspec", "tree": True, **head},
        "suffix, sparse verification": {"method": "suffix", "verification.attention": "per_head"},
    }
    count: Any = options.nodes if options.nodes == "auto" else int(options.nodes)
    chosen = {name: {**known[name], "num_speculative_tokens": count} for name in options.methods}
    return {"none": {"method": "none"}, **chosen}


def _measure(llm: LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each task, context and method."""
    llms = {name: llm.with_method(config) for name, config in _methods(options).items()}
    names, turn = list(llms), 0
    totals: dict[tuple[str, int, str], Total] = defaultdict(Total)
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, temperature=options.temperature, seed=0)

    for task in options.tasks:
        for context in options.contexts:
            room = min(context, llm.target.max_length - options.max_tokens) - _TEMPLATE
            for messages in _questions(llm, task, room, options):
                prompt = llm.chat_prompt(messages)
                turn += 1
                texts = {}
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    texts[name] = _answer(llms[name], prompt, params, totals[task, context, name])
                for name in names:
                    totals[task, context, name].unequal += texts[name] != texts["none"]
    return [
        {
            "task": task,
            "context": context,
            "method": name,
            "tokens_per_second_decoding": total.decoded / total.seconds,
            "speedup": total.decoded / total.seconds / _rate(totals[task, context, "none"]),
            "unequal_outputs": total.unequal,
            "drafter_bytes": total.ring,
            **metrics_fields(total.metrics),
        }
        for (task, context, name), total in totals.items()
    ]


def _questions(llm: LLM, task: str, room: int, options: argparse.Namespace) -> list[list[dict[str, str]]]:
    """Conversations of at most ``room`` tokens, nearly, that end with a question of the task."""

    def count(text: str) -> int:
        return len(llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    alike = options.fill == "exchanges"
    smallest = min(options.contexts) - _TEMPLATE if alike else room
    setting = catalog.Setting(data=options.data, context=smallest, count=count)
    # enough others for the longest context, and for every context the same ones in the same order
    examples = catalog.find(task).examples(options.limit + (room // smallest if alike else 0), setting)
    asked, others = examples[: options.limit], examples[options.limit :]
    earlier: list[dict[str, str]] = []
    for example in others:
        exchange = [("user", example.prompt), ("assistant", example.answer)]
        room -= sum(count(text) + _TEMPLATE // 4 for _, text in exchange)
        if room < smallest:
            break
        earlier += [{"role": role, "content": text} for role, text in exchange]
    return [[*earlier, {"role": "user", "content": example.prompt}] for example in asked]


def _answer(llm: LLM, prompt: Any, params: SamplingParams, total: Total) -> list[int]:
    """The tokens of one answer; the clock begins at the first one."""
    (request,) = llm.new_requests(prompt, params)
    engine = llm.engine
    engine.add(request)
    while not request.num_output and engine.busy:
        engine.step()
    began, first = time.perf_counter(), request.num_output
    while engine.busy:
        engine.step()
        ring = getattr(llm.recipe.drafter, "ring", None)
        total.ring = None if ring is None else ring.num_bytes
    if request.error is not None:
        raise SystemExit(request.error)
    total.seconds += time.perf_counter() - began
    total.decoded += request.num_output - first
    total.metrics.add(request.metrics)
    return list(request.output_ids)


def _rate(total: Total) -> float:
    return total.decoded / total.seconds


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "task", "context", "method", "tokens per step", "tokens/s, decoding", "over plain", "unequal", "bytes"
    )
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['context']:,}",
            row["method"],
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_second_decoding']:.1f}",
            f"{row['speedup']:.2f}x",
            str(row["unequal_outputs"]),
            "-" if row["drafter_bytes"] is None else f"{row['drafter_bytes']:,}",
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:long")
    parser.add_argument("--head", type=Path, help="of longspec; default: the target's own")
    parser.add_argument("--data", type=Path, help="folder of the corpora")
    parser.add_argument("--tasks", nargs="+", default=["qmsum", "keys"])
    parser.add_argument(
        "--fill", choices=["meeting", "exchanges"], default="meeting", help="what makes a context longer"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[1000, 4000, 8000, 16000])
    parser.add_argument(
        "--methods", nargs="+", default=["ngram", "suffix", "draft_model", "longspec", "longspec, tree"]
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=2, help="questions of each task and context")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", default="auto", help="draft tokens of every step; default: as many as pay")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
