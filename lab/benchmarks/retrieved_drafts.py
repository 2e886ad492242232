"""Drafts from a datastore of the target's own earlier answers, against one of task text, alone and fused.

    python benchmarks/retrieved_drafts.py --answers 600 --limit 8 --json retrieved_drafts.json

Stores: A holds the reference answers to generated training questions, B what the target itself answers to the same
ones, greedily; both are frozen before anything is measured, and no evaluation question or answer is in them (the
generators keep the halves apart). Every prompt goes through all methods one after the other, in an order that rotates.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
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
from foretoken.data import documents as doc
from foretoken.drafting.datastore.build import build
from foretoken.drafting.datastore.layout import Manifest
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken_lab.peers.versions import Quiet, command
from foretoken_lab.tasks import arithmetic, catalog, forms
from foretoken_lab.tasks.example import Example

_TRAINING = {
    "arithmetic": lambda: arithmetic.examples("train", 1),
    "json": lambda: forms.json_examples("train", 1),
    "code": lambda: forms.code_examples("train", 1),
}
_DRAFT = "zoo:draft"


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    quiet = Quiet()
    if options.json:
        check_writable(options.json, "--json")
    llm = LLM(options.target, dtype=options.dtype, threads=options.threads, speculative_config=None)
    with tempfile.TemporaryDirectory() as folder:
        sizes = _stores(llm, Path(folder), options)
        rows = _measure(llm, Path(folder), options)
    Console(width=160).print(_table(rows))
    others = quiet.report()
    if options.json:
        facts = provenance([], model=options.target, draft=_DRAFT, dtype=options.dtype, threads=options.threads)
        facts["command"] = command("retrieved_drafts.py")
        facts["share_of_processors_used_by_others"] = others
        found = {"provenance": facts, "tokens_of_stores": sizes, "rows": rows}
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    return 0


def _stores(llm: LLM, folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """Two datastores; the tokens of each."""
    examples = [each for make in _TRAINING.values() for each in _distinct(make(), options.answers)]
    prompts = [llm.chat_prompt([{"role": "user", "content": each.prompt}]) for each in examples]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=options.max_tokens))
    own = [doc.exchange(each.prompt, output.text) for each, output in zip(examples, outputs, strict=True)]
    given = [doc.exchange(each.prompt, each.response) for each in examples]
    vocabulary = llm.tokenizer.get_vocab()
    manifest = Manifest(max(vocabulary.values()) + 1, vocabulary_fingerprint(llm.tokenizer), llm.target.name)
    sizes = {}
    for name, texts in (("text", given), ("own", own)):
        sizes[name] = build(llm.tokenizer(texts, add_special_tokens=False)["input_ids"], folder / name, manifest).tokens
    return sizes


def _distinct(examples: Iterator[Example], count: int) -> list[Example]:
    found = {each.prompt: each for each in islice(examples, 4 * count)}
    return list(found.values())[:count]


def _measure(llm: LLM, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each method and task."""
    methods: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "suffix": {"method": "suffix"},
        "draft_model": {"method": "draft_model", "model": _DRAFT},
        "rasd, prompt": {"method": "rasd", "model": _DRAFT},
    }
    for store in ("text", "own"):
        place = str(folder / store)
        methods[f"rest, {store}"] = {"method": "rest", "datastore": place}
        methods[f"rasd, {store}"] = {"method": "rasd", "model": _DRAFT, "datastore": place}
    for pruning in ("top", "none"):
        own = {"method": "rasd", "model": _DRAFT, "datastore": str(folder / "own"), "pruning": pruning}
        methods[f"rasd, own, pruning={pruning}"] = own
    nodes = {"num_speculative_tokens": options.nodes}
    llms = {name: llm.with_method({**config, **({} if name == "none" else nodes)}) for name, config in methods.items()}
    totals: dict[tuple[str, str], Metrics] = defaultdict(Metrics)
    unequal: dict[tuple[str, str], int] = defaultdict(int)
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    turn = 0
    for task in _TRAINING:
        for example in catalog.find(task).examples(options.limit, catalog.Setting()):
            prompt = llm.chat_prompt([{"role": "user", "content": example.prompt}])
            names = list(llms)
            turn += 1
            texts = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                (output,) = llms[name].generate(prompt, params)
                texts[name] = output.token_ids
                totals[name, task].add(output.metrics)
            for name in names:
                unequal[name, task] += texts[name] != texts["none"]
    return [
        {
            "method": name,
            "task": task,
            "speedup": total.tokens_per_second / totals["none", task].tokens_per_second,
            "unequal_outputs": unequal[name, task],
            **metrics_fields(total),
        }
        for (name, task), total in totals.items()
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method", "task", "tokens per step", "speed over plain", "accepted", "from (share of accepted)")
    for row in sorted(rows, key=lambda each: (each["task"], each["method"])):
        accepted = row["num_accepted_tokens"]
        shares = sorted(row["accepted_by_source"].items(), key=lambda each: -each[1])
        table.add_row(
            row["method"],
            row["task"],
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{accepted / max(1, row['num_draft_tokens']):.0%}",
            ", ".join(f"{name} {count / accepted:.0%}" for name, count in shares),
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:base")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--answers", type=int, default=600, help="training questions of each task")
    parser.add_argument("--limit", type=int, default=8, help="evaluation questions of each task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=8, help="draft tokens of every step")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
