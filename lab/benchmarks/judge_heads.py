"""Judges next to each other and next to what needs no head, on newly mined tokens of held-out questions, task by task.

    python benchmarks/judge_heads.py --heads OLD,NEW --labels heldout.jsonl

Tokens are the draft's (judge/mining.py) where they are not the target's own choice; ``greedy`` are the draft's
favourites alone, what a greedy draft proposes. Area under the ROC curve within a task, for the tasks with at least 20
tokens of either kind; the mean over them; and what the second head has more of it than the first, with the middle 95 %
over questions drawn with replacement. A score without a head counts in the direction that predicts more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.llm import LLM
from foretoken.methods.judge.network import JudgeHead
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.load import load
from foretoken.train.roc import auc
from foretoken_lab.judge.labels import Labels, read_states
from foretoken_lab.judge.mining import ABREAST, RANDOM, Mining, mine
from foretoken_lab.judge.store import Store
from foretoken_lab.judge.train import best_without_head, quality, without_head
from foretoken_lab.measurement import Measurement

TASKS = ("arithmetic", "keys", "code", "profiles", "json")
FEWEST = 20  # tokens of the rarer kind
RESAMPLES = 1000


def main() -> None:
    """Mine, compare, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:base")
    parser.add_argument("--draft-model", default="zoo:draft")
    parser.add_argument("--heads", required=True, help="folders of foretoken train judge, comma-separated")
    parser.add_argument("--questions", type=int, default=150, help="of each task")
    parser.add_argument("--labels", type=Path, help="keep the mined labels in this file, and go on from it")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    measurement = Measurement("judge_heads.py", given.out, threads=None, option="--out")
    llm = LLM(
        given.target,
        speculative_config={"method": "none"},
        device="cpu",
        threads=1,
        max_num_seqs=ABREAST,
        enable_prefix_caching=True,
    )
    draft = load(given.draft_model, device="cpu")
    how = Mining(tasks=TASKS, count=given.questions * len(TASKS), held_out=True)
    marks = fingerprint_of(llm.target.source), fingerprint_of(draft.source)
    store = None if given.labels is None else Store(given.labels, *marks, how.choices)
    mined = mine(llm, draft, how, lambda number: print(f"{number} of {how.count}", file=sys.stderr), store)
    labels, of_draft = read_states(llm.target, mined.questions), read_states(draft, mined.questions)
    kept_N = labels.asked_N & (labels.source_N != labels.sources.index(RANDOM))
    labels, draft_N3 = labels.of(kept_N), of_draft.law_N3[kept_N]
    heads = {folder: JudgeHead.load(Path(folder)) for folder in given.heads.split(",")}
    scores = {folder: head.judge(labels.hidden_ND) for folder, head in heads.items()}
    without = without_head(labels, draft_N3)
    record: dict[str, Any] = {"asked": mined.used, "answered_rightly": mined.right}
    favourite_N = draft_N3[:, 1] >= 0
    for name, here_N in (("all", torch.ones(len(labels)).bool()), ("greedy", favourite_N)):
        record[name] = compare(
            labels.of(here_N),
            {each: (it_N[here_N], heads[each].config.threshold) for each, it_N in scores.items()},
            {each: it_N[here_N] for each, it_N in without.items()},
        )
    print(json.dumps(record, indent=1))
    measurement.write(record, model=given.target, draft=given.draft_model)


def compare(labels: Labels, heads: Mapping[str, tuple[Tensor, float]], without: Mapping[str, Tensor]) -> dict[str, Any]:
    """The figures of some tokens.

    Args:
        heads: folder -> its scores of the tokens, [N], and its threshold.
        without: name -> scores that need no head, [N].
    """
    tasks: dict[str, Any] = {}
    for name in (each for each in TASKS if each in labels.sources):
        told = {head: quality(labels, *each, without, name) for head, each in heads.items()}
        first = next(iter(told.values()))
        tasks[name] = {
            "fine": first["fine"],
            "bad": first["bad"],
            "auc_of": first["auc_of"],
            "best_without_head": best_without_head(first),
            "heads": {
                head: {part: each[part] for part in ("auc", "fine_accepted", "false_accepts", "false_accepts_interval")}
                for head, each in told.items()
            },
        }
    telling = [name for name, each in tasks.items() if min(each["fine"], each["bad"]) >= FEWEST]
    macro = {head: _macro(labels, score_N, telling) for head, (score_N, _) in heads.items()}
    best = [tasks[name]["best_without_head"][1] for name in telling]
    found = {"tasks": tasks, "telling": telling, "macro_auc": macro, "macro_best_without_head": _mean(best)}
    if len(heads) == 2 and telling:
        found["second_less_first"] = _difference(labels, [score_N for score_N, _ in heads.values()], telling)
    return found


def _macro(labels: Labels, score_N: Tensor, tasks: list[str]) -> float | None:
    areas = []
    for name in tasks:
        here_N = labels.source_N == labels.sources.index(name)
        areas.append(auc(score_N[here_N], labels.fine_N[here_N]))
    return _mean([each for each in areas if each is not None])


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _difference(labels: Labels, scores: list[Tensor], tasks: list[str]) -> list[float]:
    """Lower end, value and upper end."""
    generator = torch.Generator().manual_seed(0)
    rows = [(labels.question_N == each).nonzero()[:, 0] for each in labels.question_N.unique().tolist()]

    def less(kept_N: Tensor) -> float:
        some = labels.of(kept_N)
        first, second = (_macro(some, score_N[kept_N], tasks) or 0.0 for score_N in scores)
        return second - first

    drawn = [
        less(torch.cat([rows[place] for place in torch.randint(len(rows), (len(rows),), generator=generator).tolist()]))
        for _ in range(RESAMPLES)
    ]
    low, high = torch.tensor(drawn).quantile(torch.tensor([0.025, 0.975])).tolist()
    return [round(each, 4) for each in (low, less(torch.arange(len(labels))), high)]


if __name__ == "__main__":
    main()
