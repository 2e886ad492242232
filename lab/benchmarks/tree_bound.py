"""What trees could gain at most over chains: how the target's tokens rank in the draft's distributions, and what rows
cost.

    python benchmarks/tree_bound.py --model grown:hybrid:100m --draft-model zoo:draft --json tree_bound.json

The target answers held-out questions, and each model reads each answer once. Of every position: the rank r of the
target's token in the draft's distribution and, above temperature 0, a = sum of min(p, q). After any position i then
stand

    chain of k, its best tokens      sum over d of  [r_i .. r_i+d-1 all 1]
    chain of k, drawn                sum over d of  a_i * .. * a_i+d-1                        (a rule of p/q)
    tree with w_d nodes at depth d   sum over d of  [r_i+j <= w_j+1 for all j < d]            at most

since a node has at most w_d children at depth d: no tree of a fixed shape, whichever nodes it takes, accepts more. The
best widths of every number of nodes are found by trying all. Speed: tokens a step over the time of a forward of 1 + N
rows (measured here, a chain; a tree's rows cost no less) and of as many draft steps as the draft is deep.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from forwards import interleaved, quartiles
from state_space import Held, ids
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken_lab.measurement import Measurement
from foretoken_lab.suites.state_space import TASKS
from foretoken_lab.tasks import catalog
from foretoken_lab.tasks.catalog import Setting

DEEPEST, WIDEST = 8, 4


def shapes(nodes: int, depth: int, widest: int) -> Iterator[tuple[int, ...]]:
    """Widths by depth, none above the one before it, of so many nodes."""
    if nodes == 0 or depth == 0:
        if nodes == 0:
            yield ()
        return
    for width in range(min(nodes, widest), 0, -1):
        for rest in shapes(nodes - width, depth - 1, width):
            yield (width, *rest)


def laws(model: LanguageModel, tokens: Sequence[int], begin: int) -> Tensor:
    """The distributions of tokens from ``begin`` on, [T, V]."""
    cache = model.new_cache(1)
    slot = cache.acquire()
    cache.reserve(slot, len(tokens))
    batch = PackedBatch()
    batch.add_chunk(slot, 0, list(tokens[:-1]), wanted=len(tokens) - begin)
    return model.forward(batch, DensePlan(cache, batch)).logits_MV.float().softmax(-1)


def positions(
    target: LanguageModel, draft: LanguageModel, args: argparse.Namespace, hot: float
) -> dict[str, list[Any]]:
    """Of every task, of every answer: rank and overlap of each of its tokens."""
    llm = LLM.from_target(target)
    found: dict[str, list[Any]] = {}
    for task in TASKS:
        prompts = [each.prompt for each in catalog.find(task).examples(args.limit, Setting())]
        params = SamplingParams(max_tokens=args.max_tokens, temperature=hot, seed=0 if hot else None)
        for output in llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params):
            text = [*output.prompt_token_ids, *output.token_ids]
            begin = len(output.prompt_token_ids)
            p_TV, q_TV = laws(target, text, begin), laws(draft, text, begin)
            own_T1 = torch.tensor(text[begin:])[:, None]
            rank_T = (q_TV > q_TV.gather(1, own_T1)).sum(-1) + 1
            overlap_T = torch.minimum(p_TV, q_TV).sum(-1)
            found.setdefault(task, []).append([rank_T.tolist(), [round(each, 4) for each in overlap_T.tolist()]])
    return found


def accepted(texts: Sequence[Any], widths: Sequence[int], *, drawn: bool) -> float:
    """Draft tokens that stand after a position, on average over all of them."""
    total = count = 0.0
    for ranks, overlaps in texts:
        for start in range(len(ranks)):
            count += 1
            reach = 1.0
            for depth, width in enumerate(widths):
                if start + depth >= len(ranks):
                    break
                reach *= overlaps[start + depth] if drawn else ranks[start + depth] <= width
                total += reach
                if not reach:
                    break
    return total / count if count else 0.0


def row_ms(model: LanguageModel, counts: Sequence[int], repeats: int) -> dict[int, float]:
    """Milliseconds of a chain of so many rows."""
    held = {
        str(count): Held(model, TokenTree(ids(count - 1), range(-1, count - 2)), DensePlan, unrolled=False)
        for count in counts
    }
    timed = interleaved({name: each.forward for name, each in held.items()}, repeats)
    return {int(name): quartiles(each)["median"] * 1e3 for name, each in timed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="grown:hybrid:100m")
    parser.add_argument("--draft-model", default="zoo:draft")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=6, help="questions of each task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=8, help="of a draft, at most")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measurement = Measurement("tree_bound.py", args.json, threads=args.threads)
    target, draft = (load(name, dtype="bfloat16", device="cpu") for name in (args.model, args.draft_model))
    costs = row_ms(target, range(1, args.nodes + 2), args.repeats)
    step = row_ms(draft, [1], args.repeats)[1]
    print("target, ms by rows:", {rows: round(each, 2) for rows, each in costs.items()}, "draft step:", round(step, 2))
    report: dict[str, Any] = {"row_ms": costs, "draft_ms": step, "rows": []}
    for hot in args.temperatures:
        tasks = positions(target, draft, args, hot)
        tasks["all"] = [text for texts in tasks.values() for text in texts]
        for task, texts in tasks.items():
            best: dict[str, tuple[float, float, tuple[int, ...]]] = {}
            for nodes in range(1, args.nodes + 1):
                ways = [("chain", (1,) * nodes, False)] + ([("drawn", (1,) * nodes, True)] if hot else [])
                ways += [("tree", widths, False) for widths in shapes(nodes, DEEPEST, WIDEST) if max(widths) > 1]
                for kind, widths, drawn in ways:
                    tokens = 1 + accepted(texts, widths, drawn=drawn)
                    speed = tokens / (costs[nodes + 1] + step * len(widths))
                    best[kind] = max(best.get(kind, (0.0, 0.0, ())), (speed, tokens, widths))
            chain = max(best["chain"][0], best.get("drawn", (0.0,))[0])
            row = {"temperature": hot, "task": task, "tree_over_best_chain": best["tree"][0] / chain, "best": best}
            report["rows"].append(row)
            shown = "  ".join(f"{kind} {tokens:.2f} {widths}" for kind, (_, tokens, widths) in best.items())
            print(f"T={hot:g} {task:11s} tree over the best chain, at most {row['tree_over_best_chain']:.3f}   {shown}")
    measurement.write(report, model=args.model, draft=args.draft_model)


if __name__ == "__main__":
    main()
