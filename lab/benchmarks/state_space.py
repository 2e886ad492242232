"""What verifying costs on a target with state-space layers: a chain, a tree, and the tree's paths one by one.

    python benchmarks/state_space.py --models zoo:hybrid,zoo:mamba --rows 1,2,4,8,16,32,64 --json state_space.json

Per number of rows: a chain, a binary tree row by row (walk) and all at once (scan), and the same tree unrolled, every
path to a leaf as a fork of the slot with rows of its own. One forward each, after a prompt, in turns; nothing is
committed. Bytes are those of the cache after the forward.

With --draft, decoding with that draft model: chains and trees of fixed sizes and adaptive ones, greedy, one bundled
prompt a task, the recipes in turns prompt by prompt, timed from the first token on; of the models that --drafted names.
Last, plain decoding next to ``generate`` of transformers, in the same process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from forwards import greedy, interleaved, quartiles, timed
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.core.tree import TokenTree
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.stree.plan import TreeScan
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, source_of
from foretoken.models.prefill import prefill
from foretoken_lab.measurement import Measurement

PREFIX, TOKENS = 128, 96


def ids(count: int) -> list[int]:
    return [(37 * each) % 4096 + 100 for each in range(count)]


class Held:
    """One shape of a verification, after a prompt in a cache of its own."""

    def __init__(self, model: LanguageModel, tree: TokenTree, plan: type[DensePlan], unrolled: bool) -> None:
        self.model, self.plan = model, plan
        self.trees = [tree]
        if unrolled:
            leaves = [node for node in range(len(tree)) if node not in tree.parents]
            self.trees = [TokenTree([tree.tokens[each] for each in tree.path_to(leaf)]) for leaf in leaves] or [tree]
        self.cache = model.new_cache(len(self.trees))
        slot = self.cache.acquire()
        prefill(model, self.cache, slot, ids(PREFIX))
        self.slots = [slot, *(self.cache.fork(slot) for _ in self.trees[1:])]

    def forward(self) -> None:
        batch = PackedBatch()
        for slot, tree in zip(self.slots, self.trees, strict=True):
            self.cache.reserve(slot, 1 + len(tree))
            batch.add_tree(slot, PREFIX, 7, tree)
        self.model.forward(batch, self.plan(self.cache, batch))


def shapes(rows: int) -> dict[str, tuple[TokenTree, type[DensePlan], bool]]:
    line = TokenTree(ids(rows - 1))
    binary = TokenTree(ids(rows - 1), [(each + 1) // 2 - 1 for each in range(rows - 1)])
    return {
        "chain": (line, DensePlan, False),
        "tree, walk": (binary, DensePlan, False),
        "tree, scan": (binary, TreeScan, False),
        "tree, unrolled": (binary, DensePlan, True),
    }


def verification(name: str, dtype: str, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    model = load(name, dtype=dtype, device="cpu")
    found = []
    for rows in counts:
        held = {kind: Held(model, *shape) for kind, shape in shapes(rows).items()}
        calls: dict[Any, Callable[[], Any]] = {kind: each.forward for kind, each in held.items()}
        for kind, seconds in interleaved(calls, repeats).items():
            found.append(
                {"model": name, "rows": rows, "shape": kind, "seconds": quartiles(seconds)}
                | {"bytes": held[kind].cache.num_bytes, "requests": len(held[kind].trees)}
            )
            print(f"{name} {rows:3d} rows, {kind:15s} {1e3 * quartiles(seconds)['median']:8.2f} ms")
    return found


def decoding(name: str, dtype: str, repeats: int) -> dict[str, Any]:
    """Milliseconds a token, prompt taken off: ours and the library's, in turns."""
    llm = LLM(name, dtype=dtype, device="cpu", speculative_config=None)
    theirs: Any = AutoModelForCausalLM.from_pretrained(source_of(name), dtype=getattr(torch, dtype))
    prompt = ids(32)
    given = torch.tensor([prompt])

    def generate(count: int) -> None:
        with torch.inference_mode():
            options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            theirs.generate(given, attention_mask=torch.ones_like(given), **options)

    runs: dict[str, Callable[[int], Any]] = {
        "foretoken": lambda count: greedy(llm, prompt, count),
        "transformers": generate,
    }
    seconds: dict[str, list[float]] = {engine: [] for engine in runs}
    for _ in range(repeats):
        for engine, run in runs.items():
            short = timed(lambda run=run: run(1))
            seconds[engine].append((timed(lambda run=run: run(1 + TOKENS)) - short) / TOKENS)
    result = {engine: quartiles(each) for engine, each in seconds.items()}
    ratio = result["transformers"]["median"] / result["foretoken"]["median"]
    print(f"{name}: {1e3 * result['foretoken']['median']:.2f} ms a token, generate {ratio:.1f} times that")
    return {"model": name, "seconds_per_token": result, "ratio": ratio}


def recipes(draft: str, sizes: list[int]) -> dict[str, dict[str, Any] | None]:
    """Label to ``speculative_config``."""
    config = {"method": "draft_model", "model": draft}
    found: dict[str, dict[str, Any] | None] = {"plain": None, "chain, adaptive": config}
    found["tree, adaptive"] = {**config, "tree": "reranked", "num_drafts": 2}
    for size in sizes:
        found[f"chain of {size}"] = {**config, "num_speculative_tokens": size}
        found[f"tree of {size}"] = {**config, "num_speculative_tokens": size, "tree": "topk", "num_drafts": 2}
    return found


def speculation(name: str, dtype: str, draft: str, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Tokens per second of every recipe, over plain decoding and over the best chain, within each repeat."""
    base = LLM(name, dtype=dtype, device="cpu", seed=0, speculative_config=None)
    engines = {label: base.with_method(config) for label, config in recipes(draft, sizes).items()}
    suite = limit_per_category(read_prompts(BUNDLED_SUITE), 1)
    prompts = [base.chat_prompt([{"role": "user", "content": each.text}]) for each in suite]
    params = SamplingParams(max_tokens=1 + TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {label: [] for label in engines}
    per_step: dict[str, float] = {}
    for repeat in range(repeats + 1):
        seconds, steps = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
        for prompt in prompts:
            for label, llm in engines.items():
                (request,) = llm.new_requests(prompt, params)
                llm.engine.add(request)
                while not (request.num_output or request.finished):
                    llm.engine.step()
                began, before = perf_counter(), request.metrics.num_steps
                while not request.finished:
                    llm.engine.step()
                if request.num_output != params.max_tokens:  # a failure is no figure
                    raise SystemExit(f"{name}, {label}: {request.num_output} tokens, then: {request.error}")
                seconds[label] += perf_counter() - began
                steps[label] += request.metrics.num_steps - before
        for label in engines:
            per_step[label] = TOKENS * len(prompts) / steps[label]
            if repeat:  # in the first turn caches and controllers find their places
                rates[label].append(TOKENS * len(prompts) / seconds[label])
    best = max((statistics.median(rates[each]), each) for each in engines if each.startswith("chain"))[1]
    found = []
    for label, own in rates.items():
        over = {
            f"over {other}": quartiles([mine / its for mine, its in zip(own, rates[other], strict=True)])
            for other in ("plain", best)
        }
        row = {"recipe": label, "tokens_per_second": quartiles(own), "tokens_per_step": per_step[label], **over}
        found.append({"model": name, "draft": draft, "best_chain": best, **row})
        print(
            f"{name} {label:16s} {per_step[label]:.2f} tokens a step, {over['over plain']['median']:.2f} times plain, "
            f"{over[f'over {best}']['median']:.2f} times the best chain"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="zoo:hybrid,zoo:mamba")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--draft", help="a draft model with the models' vocabulary")
    parser.add_argument("--drafted", help="those of the models that it drafts for; default: all")
    parser.add_argument("--sizes", default="2,4,8", help="nodes of its chains and trees")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    measurement = Measurement("state_space.py", given.json, threads=given.threads)
    record: dict[str, Any] = {"verification": [], "speculation": [], "decoding": []}
    for name in given.models.split(","):
        counts = [int(each) for each in given.rows.split(",") if each]
        record["verification"] += verification(name, given.dtype, counts, given.repeats)
        if given.draft is not None and name in (given.drafted or given.models).split(","):
            sizes = [int(each) for each in given.sizes.split(",")]
            record["speculation"] += speculation(name, given.dtype, given.draft, sizes, max(3, given.repeats // 5))
        record["decoding"].append(decoding(name, given.dtype, max(3, given.repeats // 5)))
    measurement.write(record, models=given.models, draft=given.draft, dtype=given.dtype)


if __name__ == "__main__":
    main()
