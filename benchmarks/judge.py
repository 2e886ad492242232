"""Judge Decoding on held-out questions: what its threshold trades, and what other relaxations give for as much.

    python benchmarks/judge.py [--target zoo:base --draft zoo:draft --head DIR] [--limit N] [--mine N] [--json OUT]

Three tables, all greedy, of questions that neither the models nor the head were trained on:

* labels: newly mined ones (``--mine`` questions; methods/judge/mining.py), random tokens among them, and what the head
  says of them;
* rules: accuracy of every rule over its knob, minus that of exact verification on the same questions (paired, 95 %),
  and tokens per step; then for each threshold of the judge the value of every other rule whose tokens per step are
  nearest: equal gain, so that their accuracies can be compared;
* adversaries: a drafter that knows the target's own answer and puts one wrong token into every draft, a digit for
  another one where there is a digit (``wrong fact``), and one whose drafts are random. The rule has to bear with them.

Wall time is not reported: at this size the rules cost alike, and tokens per step say what they gain.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.core.draft import NO_DRAFT, Draft, PointMass
from foretoken.core.protocols import Budget, Context
from foretoken.core.provenance import provenance
from foretoken.core.tree import TokenTree
from foretoken.methods.judge.head import JudgeHead
from foretoken.methods.judge.labels import Labels, read_states
from foretoken.methods.judge.mining import Mining, mine
from foretoken.methods.judge.train import quality
from foretoken.models.load import load
from foretoken.tasks import catalog
from foretoken.tasks.catalog import Setting
from foretoken.tasks.difference import paired_difference
from foretoken.tasks.evaluate import Answer, evaluate, prompt_ids

TASKS = ("profiles", "code", "arithmetic", "json")
MINED_SEED = 1  # the bundled head was trained on the questions of seed 0
GRIDS: dict[str, tuple[str, tuple[float, ...]]] = {  # from strict to loose
    "judge": ("threshold", (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)),
    "topk_relaxed": ("relaxed_delta", (0.03, 0.1, 0.2, 0.4, 0.8)),
    "p_threshold": ("min_prob", (0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003)),
    "kl_threshold": ("max_kl", (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)),
}
ADVERSE: dict[str, tuple[float | None, ...]] = {
    "judge": (None, 0.5),  # None: what the head was calibrated to
    "topk_relaxed": (0.1, 0.4),
    "p_threshold": (0.2, 0.05),
}


class Adversary:
    """Drafts the target's own answer with one wrong token in it, or nothing but random tokens.

    Args:
        answers: prompt -> the target's greedy answer.
        tokenizer: to know the digits.
        wrong_fact: else random tokens.
    """

    name = "adversary"
    laws = (PointMass,)
    branches = False

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], tokenizer: Any, wrong_fact: bool) -> None:
        self._answers, self._wrong_fact = answers, wrong_fact
        self._digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
        self._words = [each for each in range(len(tokenizer)) if each not in tokenizer.all_special_ids]
        self._rng = random.Random(0)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        length = min(budget.max_nodes, budget.max_depth)
        if not self._wrong_fact:
            return Draft(TokenTree([self._rng.choice(self._words) for _ in range(length)]), PointMass())
        said = list(context.tokens[context.num_prompt :])
        answer = list(self._answers[tuple(context.tokens[: context.num_prompt])])
        # behind a token that should not have stood it goes on as if nothing had happened
        drafted = answer[len(said) : len(said) + length]
        if not drafted:
            return NO_DRAFT
        digits = [place for place, token in enumerate(drafted) if token in self._digits]
        place = self._rng.choice(digits or range(len(drafted)))
        choice = self._digits if digits else self._words
        drafted[place] = self._rng.choice([each for each in choice if each != drafted[place]])
        return Draft(TokenTree(drafted), PointMass())

    def observe(self, outcomes: Any) -> None:
        pass

    def release(self, request_id: int) -> None:
        pass


class Asked:
    """The questions, asked of one recipe after the other."""

    def __init__(self, llm: LLM, tasks: Sequence[str], limit: int) -> None:
        self.llm = llm
        self.tasks = {name: catalog.find(name) for name in tasks}
        self.examples = {name: task.examples(limit, Setting()) for name, task in self.tasks.items()}

    def run(self, recipe: Mapping[str, Any], llm: LLM | None = None) -> dict[str, Any]:
        """Answers by task, and the figures of all of them together."""
        llm = (llm or self.llm).with_method(dict(recipe))
        answers: dict[str, tuple[Answer, ...]] = {}
        tokens = steps = off = 0.0
        for name, task in self.tasks.items():
            params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens)
            report = evaluate(llm, task, self.examples[name], params, scorer=self.llm.target)
            answers[name] = report.answers
            tokens += report.metrics.num_tokens
            steps += report.metrics.num_steps
            off += report.distortion * report.metrics.num_tokens
        return {"answers": answers, "tokens_per_step": tokens / steps, "distortion": off / tokens}


def compared(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    """A recipe's figures as JSON: accuracy, and minus exact verification, over all tasks and for each."""
    result = {key: round(found[key], 4) for key in ("tokens_per_step", "distortion")}
    groups = {name: (found["answers"][name], exact["answers"][name]) for name in found["answers"]}
    groups["all"] = tuple(
        tuple(answer for each in run["answers"].values() for answer in each) for run in (found, exact)
    )  # type: ignore[assignment]
    for name, (own, other) in groups.items():
        right, theirs = [answer.correct for answer in own], [answer.correct for answer in other]
        difference = paired_difference(right, theirs)
        same = sum(a.token_ids == b.token_ids for a, b in zip(own, other, strict=True))
        result[name] = {
            "questions": len(right),
            "accuracy": round(sum(right) / len(right), 4),
            "minus_exact": [round(each, 4) for each in (difference.mean, difference.low, difference.high)],
            "lost": difference.second_only,
            "won": difference.first_only,
            "same_text": round(same / len(right), 4),
        }
    return result


def labels_table(head: JudgeHead, labels: Labels) -> list[dict[str, Any]]:
    """What the head says of newly mined labels at each threshold, by task."""
    score_N = head.judge(labels.hidden_ND)
    rows = []
    for threshold in sorted({head.config.threshold, *GRIDS["judge"][1]}, reverse=True):
        by_task = {
            name: quality(labels.of(labels.source_N == place), score_N[labels.source_N == place], threshold)
            for place, name in enumerate(labels.sources)
        }
        rows.append({"threshold": threshold, "all": quality(labels, score_N, threshold), "by_task": by_task})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:base")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--head", type=Path, help="default: the one beside the target's weights")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--limit", type=int, default=40, help="questions of each task")
    parser.add_argument("--mine", type=int, default=300, help="questions to mine labels from")
    parser.add_argument("--num-speculative-tokens", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = LLM(options.target, speculative_config={"method": "none"}, max_num_seqs=16, seed=0)
    place = options.head or Path(llm.target.source) / JudgeHead.algorithm
    head = JudgeHead.load(place)
    found: dict[str, Any] = {
        "provenance": provenance(sys.argv),
        "options": {key: str(value) for key, value in vars(options).items()},
        "threshold": head.config.threshold,
    }
    tasks = tuple(options.tasks.split(","))
    if options.mine:
        mined = mine(llm, load(options.draft), Mining(tasks=tasks, count=options.mine, seed=MINED_SEED))
        labels = read_states(llm.target, mined.questions)
        found["labels"] = labels_table(head, labels.of(labels.asked_N))
        _show_labels(found["labels"])

    asked = Asked(llm, tasks, options.limit)
    chain = {
        "method": "draft_model",
        "model": options.draft,
        "tree": "chain",
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    exact = asked.run({**chain, "verifier": "auto"})
    alone = LLM(options.draft, speculative_config={"method": "none"}, max_num_seqs=16, seed=0)
    points = [
        {"rule": "exact", "value": None, **compared(exact, exact)},
        {"rule": "draft alone", "value": None, **compared(asked.run({"method": "none"}, alone), exact)},
    ]
    points[-1]["tokens_per_step"] = None  # it calls no target
    grids = {**GRIDS, "judge": ("threshold", tuple(sorted({head.config.threshold, *GRIDS["judge"][1]}, reverse=True)))}
    for rule, (knob, values) in grids.items():
        for value in values:
            recipe = {**chain, "verifier": rule, f"{rule}.{knob}": value, **_head(rule, place)}
            points.append({"rule": rule, "value": value, **compared(asked.run(recipe), exact)})
            print(rule, value, points[-1]["tokens_per_step"], points[-1]["all"], file=sys.stderr, flush=True)
    found["rules"] = points
    found["matched"] = matched(points)
    _show_points("rules, drafts of the draft model", points)
    _show_matched(found["matched"])

    answers = {
        tuple(prompt_ids(llm, answer.example)): answer.token_ids
        for each in asked.run({"method": "none"})["answers"].values()
        for answer in each
    }
    found["adversaries"] = []
    for wrong_fact in (True, False):
        for rule, values in ADVERSE.items():
            for value in values:
                knob = {} if value is None else {f"{rule}.{GRIDS[rule][0]}": value}
                adversary = Adversary(answers, llm.tokenizer, wrong_fact)
                recipe = {
                    "method": adversary,
                    "num_speculative_tokens": options.num_speculative_tokens,
                    "verifier": rule,
                    **knob,
                    **_head(rule, place),
                }
                figures = compared(asked.run(recipe), exact)
                name = "wrong fact" if wrong_fact else "random"
                found["adversaries"].append({"drafter": name, "rule": rule, "value": value, **figures})
                print(name, rule, value, figures["tokens_per_step"], figures["all"], file=sys.stderr, flush=True)
    _show_points("rules, adversaries", found["adversaries"])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _head(rule: str, place: Path) -> dict[str, Any]:
    return {"judge.head": str(place)} if rule == "judge" else {}


def matched(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each threshold of the judge, the point of every other rule that gains most nearly as much."""
    found = []
    for own in points:
        if own["rule"] != "judge":
            continue
        others = {}
        for rule in GRIDS:
            if rule != "judge":
                others[rule] = min(
                    (each for each in points if each["rule"] == rule),
                    key=lambda each: abs(each["tokens_per_step"] - own["tokens_per_step"]),
                )
        figures = {
            rule: {"value": each["value"], "tokens_per_step": each["tokens_per_step"], **each["all"]}
            for rule, each in {"judge": own, **others}.items()
        }
        found.append(figures)
    return found


def _show_labels(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    table = Table(title="newly mined labels: fine tokens accepted, bad tokens accepted")
    names = ["all", *first["by_task"]]
    table.add_column("threshold")
    for name in names:
        each = first["all"] if name == "all" else first["by_task"][name]
        table.add_column(f"{name}: {each['fine']} fine, {each['bad']} bad, AUC {each['auc']}", justify="right")
    for row in rows:
        cells = [row["all"] if name == "all" else row["by_task"][name] for name in names]
        table.add_row(f"{row['threshold']:.3f}", *[f"{c['fine_accepted']} / {c['false_accepts']}" for c in cells])
    Console(width=170).print(table)


def _show_points(title: str, points: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title)
    columns = ("rule", "value", "tok/step", "accuracy", "minus exact", "95 %", "same text", "distortion")
    for name in columns:
        table.add_column(name, justify="left" if name == "rule" else "right")
    for each in points:
        whole = each["all"]
        mean, low, high = whole["minus_exact"]
        name = f"{each['drafter']}: {each['rule']}" if "drafter" in each else each["rule"]
        steps = "-" if each["tokens_per_step"] is None else f"{each['tokens_per_step']:.2f}"
        value = "-" if each["value"] is None else f"{each['value']:.3g}"
        span = f"{low:+.1%} to {high:+.1%}"
        same = f"{whole['same_text']:.0%}"
        table.add_row(
            name, value, steps, f"{whole['accuracy']:.1%}", f"{mean:+.1%}", span, same, f"{each['distortion']:.3f}"
        )
    Console(width=130).print(table)


def _show_matched(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="at the judge's tokens per step: accuracy minus exact (tokens per step of the nearest point)")
    for name in GRIDS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(
                f"{each['value']:.3g}: {each['minus_exact'][0]:+.1%} ({each['tokens_per_step']:.2f})"
                for each in row.values()
            )
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
