"""What choosing the drafting scheme by the draft's peakedness would gain over one scheme for every node, per task.

    python benchmarks/peakedness.py --suite FILE.jsonl [--temperatures 0.7 1] [--num-drafts 2 3] [--json OUT.json]

At positions of answers that the target samples, the acceptance of greedy drafts (`greedy_draft`, closed form) and of
draws without replacement (`recursive`, an average over sampled prefixes) is computed from p and q. A node's peakedness
is sum q^2, all that a choice which keeps the distribution may look at besides the past. The threshold is found on every
other prompt and valued on the rest, and the other way round; a task's own threshold likewise; the scheme that it is
compared with is found in the same way. Next to them stand the most that any threshold could have gained here, the
choice with knowledge of p, which no drafter has, and the optimum without replacement. Intervals are 95 % over prompts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.core.files import check_writable, write_whole
from foretoken.core.provenance import provenance
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken_lab.intervals import mean_interval
from foretoken_lab.peers.versions import Quiet, command
from foretoken_lab.studies.acceptance.observe import load_draft, observe
from foretoken_lab.studies.acceptance.optimal import optimal_acceptance
from foretoken_lab.studies.acceptance.rules import rule_acceptance


@dataclass(frozen=True, slots=True)
class Node:
    """The acceptance at one position.

    Attributes:
        prompt: its number.
        task: of the prompt.
        peakedness: sum q^2.
        greedy, without: of the two schemes with their rules.
        optimum: of the best rule without replacement.
    """

    prompt: int
    task: str
    peakedness: float
    greedy: float
    without: float
    optimum: float

    def chosen(self, threshold: float) -> float:
        """Accepted where peaked distributions are drafted for greedily."""
        return self.greedy if self.peakedness >= threshold else self.without


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    quiet = Quiet()
    if options.json:
        check_writable(options.json, "--json")
    llm = LLM(options.model, dtype=options.dtype, threads=options.threads, speculative_config=None)
    draft = load_draft(options.draft_model, llm.target)
    rows = []
    for temperature in options.temperatures:
        for num_drafts, nodes in _nodes(llm, draft, temperature, options).items():
            tasks = dict.fromkeys(node.task for node in nodes)
            rows += [
                _row(temperature, num_drafts, task, [node for node in nodes if task in (node.task, "all")])
                for task in (*tasks, "all")
            ]
    Console(width=220).print(_table(rows))
    facts = provenance([], model=options.model, draft=options.draft_model, dtype=options.dtype, threads=options.threads)
    facts["command"] = command("peakedness.py")
    facts["share_of_processors_used_by_others"] = quiet.report()
    if options.json:
        write_whole(options.json, json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")
    return 0


def _nodes(llm: Any, draft: Any, temperature: float, options: argparse.Namespace) -> dict[int, list[Node]]:
    """The positions, for every number of drafts."""
    room = min(llm.target.max_length, draft.max_length) - options.max_tokens
    prompts = limit_per_category(read_prompts(Path(options.suite)), options.limit)
    asked = [llm.chat_prompt([{"role": "user", "content": prompt.text}])["prompt_token_ids"] for prompt in prompts]
    fitting = [(ids, prompt.category) for ids, prompt in zip(asked, prompts, strict=True) if len(ids) <= room]
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=options.max_tokens)
    found: dict[int, list[Node]] = {count: [] for count in options.num_drafts}
    for each in observe(llm, draft, [ids for ids, _ in fitting], params, options.positions):
        p_MV, q_MV = each.p_MV.double(), each.q_MV.double()
        p_MV, q_MV = p_MV / p_MV.sum(-1, keepdim=True), q_MV / q_MV.sum(-1, keepdim=True)
        peaked_M = (q_MV * q_MV).sum(-1).tolist()
        for count, nodes in found.items():
            greedy_M = rule_acceptance(p_MV, q_MV, count, "greedy_draft", "greedy").tolist()
            without_M = rule_acceptance(
                p_MV, q_MV, count, "recursive", "without_replacement", num_samples=options.samples
            ).tolist()
            optimum_M = optimal_acceptance(p_MV, q_MV, count, "without_replacement").tolist()
            values = zip(peaked_M, greedy_M, without_M, optimum_M, strict=True)
            nodes += [Node(each.prompt, fitting[each.prompt][1], *its) for its in values]
    return found


def _threshold(nodes: Sequence[Node]) -> float:
    """The peakedness from which greedy drafts accept more; of equals the lowest."""
    candidates = [0.0, *sorted({node.peakedness for node in nodes}), 2.0]
    return max(candidates, key=lambda each: sum(node.chosen(each) for node in nodes))


def _gains(nodes: Sequence[Node]) -> list[float]:
    """Of the threshold that is best for these very nodes, over the better of both schemes: no other gains more."""
    threshold = _threshold(nodes)
    ahead = sum(node.greedy for node in nodes) >= sum(node.without for node in nodes)
    return [node.chosen(threshold) - (node.greedy if ahead else node.without) for node in nodes]


def _row(temperature: float, num_drafts: int, task: str, nodes: Sequence[Node]) -> dict[str, Any]:
    halves = [[node for node in nodes if node.prompt % 2 == half] for half in (0, 1)]
    thresholds = [_threshold(half) for half in halves]
    # the choice is made on one half and measured on the other, also that of the better scheme for all nodes
    chosen = [(node, node.chosen(thresholds[1 - node.prompt % 2])) for node in nodes]
    fixed = []
    for node in nodes:
        other = halves[1 - node.prompt % 2]
        ahead = sum(each.greedy for each in other) >= sum(each.without for each in other)
        fixed.append(node.greedy if ahead else node.without)
    by_prompt: dict[int, list[float]] = {}
    for (node, value), alone in zip(chosen, fixed, strict=True):
        by_prompt.setdefault(node.prompt, []).append(value - alone)
    gain, ends = mean_interval([sum(values) / len(values) for values in by_prompt.values()])

    def mean(values: Sequence[float]) -> float:
        return round(100 * sum(values) / len(values), 2)

    return {
        "temperature": temperature,
        "num_drafts": num_drafts,
        "task": task,
        "positions": len(nodes),
        "peakedness": round(sum(node.peakedness for node in nodes) / len(nodes), 3),
        "greedy": mean([node.greedy for node in nodes]),
        "without_replacement": mean([node.without for node in nodes]),
        "chosen": mean([value for _, value in chosen]),
        "gain": round(100 * gain, 2),
        "gain_interval": None if ends is None else [round(100 * end, 2) for end in ends],
        "thresholds": [round(each, 3) for each in thresholds],
        "gain_at_most": mean(_gains(nodes)),
        "knowing_p": mean([max(node.greedy, node.without) for node in nodes]),
        "optimum_without_replacement": mean([node.optimum for node in nodes]),
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    names = ("temperature", "num_drafts", "task", "positions", "peakedness", "greedy", "without_replacement", "chosen")
    names = (*names, "gain", "gain_interval", "gain_at_most", "knowing_p", "optimum_without_replacement")
    table = Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:base")
    parser.add_argument("--draft-model", default="zoo:draft")
    parser.add_argument("--suite", default=str(BUNDLED_SUITE), help="prompts; a category is a task")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--positions", type=int, default=8, help="of an answer")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32, help="sampled prefixes a position")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
