"""Reflective verification on tasks: the knowledge of its second reading, its cost, and its effect on answers.

* answers: greedy, over alpha, minus plain decoding question by question; next to them the same with an irrelevant
  prompt of equal length and with the copy alone (controls of the prompt), and ``tolerance``, which at temperature 0 is
  a constant bonus of log(1 + tolerance) on the drafted token's logit: no probe rows.
* judgement: of the draft's rejected tokens, whether the second reading separates fine ones from wrong ones better than
  scores that need no reading (foretoken_lab/suites/second_reading.py).
* copying: a drafter that knows the target's answer puts one wrong token into every draft, a digit for a digit where
  there is one. Of these tokens: how often the mix would let them stand, and D = log pr - log p0, what the second
  reading adds to them and to the right ones before them.
* cost: milliseconds of a forward of the rows of a draft, without and with a probe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from foretoken.bench.suite import Column, Run, Section, Suite
from foretoken.core.distortion import Spent
from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.data.reflection import BACK, INSTRUCTION, PREFIX
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.reflective.probe import reflected
from foretoken.methods.reflective.verifier import ReflectiveVerifier
from foretoken_lab.intervals import wilson_interval
from foretoken_lab.suites import accuracy
from foretoken_lab.suites.judge import WrongFact, digits
from foretoken_lab.suites.second_reading import judgement
from foretoken_lab.tasks.prompt_ids import question_ids

TASKS = ("profiles", "json", "code", "arithmetic")
QUESTIONS = 40  # of each task, without --limit
LABELLED = 2  # times as many questions for labels: only those with right answers have any
NODES = 6
ALPHAS = (0.1, 0.3, 0.6)
IRRELEVANT = " [Weather: the sky over the harbour was grey in the morning and the boats stayed where they were.] "
PROMPTS = {
    "[BACK]": (BACK, PREFIX),
    "instruction": (INSTRUCTION, PREFIX),
    "irrelevant": (IRRELEVANT, PREFIX),
    "copy alone": ("", PREFIX),
}
TOLERANCES = (0.2, 1.0, 5.0)
_CHAIN = f"draft_model+num_speculative_tokens={NODES}"
_REPEATS = 30


@dataclass(frozen=True, slots=True)
class Seen:
    """One drafted token that the target has read twice.

    Attributes:
        right: it is the target's own next token; if not, it was put there.
        digit: it is one.
        gain: D, in nats.
        margin: log max p0 - log p0 of the token.
        stands_from: the smallest of ``ALPHAS`` at which the mix's argmax is this token; infinity: at none.
    """

    right: bool
    digit: bool
    gain: float
    margin: float
    stands_from: float


class Watch(ReflectiveVerifier):
    """Exact verification, taking notes of what the second reading says."""

    digits: frozenset[int] = frozenset()
    seen: list[Seen] = []  # noqa: RUF012  (set anew for every use)

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        if target.probe_logits_PV is not None:
            second = reflected(draft.tree, target.probe_logits_PV, len(self.config.prompt), bonus=False)
            for node, token in enumerate(draft.tree.tokens):
                right = token == target.best[node]
                self.seen.append(self._note(target.raw_MV[node].float(), second[node], token, right))
                if not right:
                    break
        return super().verify_within(draft, target, rng, spent)

    def _note(self, z0_V: torch.Tensor, zr_V: torch.Tensor, token: int, right: bool) -> Seen:
        logp_V, logr_V = z0_V.log_softmax(-1), zr_V.log_softmax(-1)
        stands = [alpha for alpha in ALPHAS if int(((1 - alpha) * z0_V + alpha * zr_V).argmax()) == token]
        return Seen(
            right,
            token in self.digits,
            float(logr_V[token] - logp_V[token]),
            float(logp_V.max() - logp_V[token]),
            min(stands, default=math.inf),
        )


def study(run: Run) -> list[Section]:
    """Answers, judgement, copying and cost."""
    plain = run.engines["none"]
    model = next(method.config["model"] for method in run.methods if "model" in method.config)
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": NODES}
    questions = accuracy.Questions(TASKS, run.limit or QUESTIONS)
    run.progress("plain decoding")
    reference = questions.ask(plain)
    run.progress("exact verification")
    rows = accuracy.rows_of("exact", questions.ask(plain.with_method(drafts)), reference)
    for name, (prompt, prefix) in PROMPTS.items():
        for alpha in ALPHAS:
            run.progress(f"alpha={alpha}, {name}")
            config = {**drafts, "verifier": "reflective", "alpha": alpha, "prompt": prompt, "prefix": prefix}
            rows += accuracy.rows_of(f"alpha={alpha}, {name}", questions.ask(plain.with_method(config)), reference)
    for tolerance in TOLERANCES:
        run.progress(f"tolerance={tolerance}")
        config = {**drafts, "verifier": "tolerance", "tolerance": tolerance}
        rows += accuracy.rows_of(f"tolerance={tolerance}", questions.ask(plain.with_method(config)), reference)
    labelled = LABELLED * len(TASKS) * (run.limit or QUESTIONS)
    answers = {
        tuple(question_ids(plain, answer.example.prompt)): answer.token_ids
        for report in reference.values()
        for answer in report.answers
    }
    return [
        accuracy.section("greedy answers, minus those of plain decoding", rows),
        judgement(plain, model, TASKS, labelled, PROMPTS, ALPHAS[1:], NODES, run.progress),
        Section(
            "copying",
            "wrong tokens, one in every draft of the target's own answer: the share that would stand, and D",
            COPYING,
            _copying(run, questions, answers),
        ),
        Section("cost", "a forward after 256 rows", COST, _cost(plain)),
    ]


def _copying(run: Run, questions: accuracy.Questions, answers: Any) -> list[dict[str, Any]]:
    plain: Any = run.engines["none"]
    rows = []
    for name, (prompt, prefix) in PROMPTS.items():
        run.progress(f"wrong tokens, {name}")
        config = Watch.settle(Watch.Config(alpha=0.5, prompt=prompt, prefix=prefix, max_distortion=0.0), plain.target)
        watch = Watch(config)
        watch.digits, watch.seen = frozenset(digits(plain.tokenizer)), []
        drafter = WrongFact(answers, plain.tokenizer)
        engine = plain.with_method({"method": drafter, "verifier": watch, "num_speculative_tokens": NODES})
        for task in TASKS:
            watch.seen = []
            questions.ask(engine, only=task)
            wrong = [each for each in watch.seen if not each.right]
            right = [each for each in watch.seen if each.right]
            for kind, of_kind in (("digit", True), ("word", False)):
                those = [each for each in wrong if each.digit is of_kind]
                if those:
                    rows.append({"prompt": name, "task": task, "wrong": kind, **_rates(those, right)})
    return rows


def _rates(wrong: Sequence[Seen], right: Sequence[Seen]) -> dict[str, Any]:
    def share(count: int) -> list[float]:
        return [count / len(wrong), *wilson_interval(count, len(wrong))]

    return {
        "tokens": len(wrong),
        "right_tokens": len(right),
        **{f"accepted_{alpha}": share(sum(each.stands_from <= alpha for each in wrong)) for alpha in ALPHAS},
        **{f"tolerance_{each}": share(sum(token.margin <= math.log1p(each) for token in wrong)) for each in TOLERANCES},
        "gain_wrong": sum(each.gain for each in wrong) / len(wrong),
        "gain_right": sum(each.gain for each in right) / max(1, len(right)),
        "raised": share(sum(each.gain > 0 for each in wrong)),
    }


def _cost(plain: Any) -> list[dict[str, Any]]:
    """Forwards of a chain after 256 rows, interleaved."""
    model = plain.target

    def length(prompt: str) -> int:
        return len(model.tokenizer.encode(prompt, add_special_tokens=False))

    widths = {
        "the draft": 1 + NODES,
        "and a copy after one token": 1 + 2 * NODES,
        "and a copy after [BACK] and 8": 2 * NODES + 8 + length(BACK),
        "and a copy after the instruction and 8": 2 * NODES + 8 + length(INSTRUCTION),
    }
    cache = model.new_cache(1)
    slot = cache.acquire()
    times: dict[str, list[float]] = {name: [] for name in widths}
    cache.reserve(slot, 256)
    batch = PackedBatch()
    batch.add_chunk(slot, 0, list(range(100, 356)), wanted=1)
    model.forward(batch, DensePlan(cache, batch))
    cache.commit(slot, range(256))
    for _ in range(_REPEATS):
        for name, width in widths.items():
            cache.reserve(slot, width)
            batch = PackedBatch()
            batch.add_chunk(slot, 256, list(range(50, 50 + width)), wanted=width, verification=True)
            begin = perf_counter()
            model.forward(batch, DensePlan(cache, batch))
            times[name].append(perf_counter() - begin)
    base = median(times["the draft"])
    return [
        {
            "rows": widths[name],
            "what": name,
            "milliseconds": 1e3 * median(each),
            "lowest": 1e3 * min(each),
            "times": median(each) / base,
        }
        for name, each in times.items()
    ]


def _shared(name: str) -> Any:
    def cell(row: Any) -> str:
        rate, low, high = row[name]
        return f"{rate:.0%} ({100 * low:.0f}-{high:.0%})"

    return cell


COPYING = (
    Column("prompt", lambda row: row["prompt"]),
    Column("task", lambda row: row["task"]),
    Column("wrong", lambda row: row["wrong"]),
    Column("tokens", lambda row: row["tokens"], "{}"),
    *(Column(f"alpha\n{alpha}", _shared(f"accepted_{alpha}")) for alpha in ALPHAS),
    *(Column(f"tol.\n{each}", _shared(f"tolerance_{each}")) for each in TOLERANCES),
    Column("D\nwrong", lambda row: row["gain_wrong"], "{:+.1f}"),
    Column("D\nright", lambda row: row["gain_right"], "{:+.1f}"),
    Column("raised", _shared("raised")),
)
COST = (
    Column("rows of", lambda row: row["what"]),
    Column("rows", lambda row: row["rows"], "{}"),
    Column("ms", lambda row: row["milliseconds"]),
    Column("lowest", lambda row: row["lowest"]),
    Column("times", lambda row: row["times"]),
)

SUITE = Suite(
    name="reflective",
    question="does a second reading of the draft judge it or copy it, and what do its rows cost?",
    draft_model="zoo:draft",
    methods=(_CHAIN, *(f"{_CHAIN}+verifier=reflective+alpha={alpha}" for alpha in ALPHAS)),
    options={"repeats": 1},
    study=study,
)
