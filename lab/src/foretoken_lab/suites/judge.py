"""Judge Decoding on held-out questions: what its threshold trades, and what other relaxations give for as much.

Next to the common table stand three of its own, all greedy, of questions that neither the models nor the head were
trained on:

* accuracy: every recipe on the same questions, minus plain decoding question by question, with tokens per step. At
  equal tokens per step the rules can be compared.
* labels: newly mined ones (judge/mining.py), random tokens among them, and what the head says of them, next to
  what p of the token and the entropy of the target's distribution say without a head.
* adversaries: a drafter that knows the target's own answer and puts one wrong token into every draft, a digit for
  another one where there is a digit (``wrong fact``), and one with random drafts. The rule has to bear with them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from foretoken.bench.harness import Method
from foretoken.bench.suite import Column, Run, Section, Suite
from foretoken.drafting import learned_part
from foretoken.methods.judge.network import JudgeHead
from foretoken.models.load import load
from foretoken_lab.judge.labels import read_states
from foretoken_lab.judge.mining import Mining, mine
from foretoken_lab.judge.train import quality, without_head
from foretoken_lab.suites import accuracy
from foretoken_lab.tasks.prompt_ids import question_ids
from foretoken_lab.testing import Random, Scripted, Texts

TASKS = ("profiles", "code", "arithmetic", "json")
QUESTIONS = 40  # of each task, without --limit
MINED = 300  # questions, without --limit
CHAIN = "draft_model+tree=chain+num_speculative_tokens=10"
GRIDS: dict[str, tuple[str, tuple[float, ...]]] = {  # from strict to loose
    "judge": ("threshold", (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)),
    "topk_relaxed": ("relaxed_delta", (0.03, 0.1, 0.2, 0.4, 0.8)),
    "p_threshold": ("min_prob", (0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003)),
    "kl_threshold": ("max_kl", (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)),
}
BEAR = (
    "judge",
    "topk_relaxed",
    "p_threshold",
)  # rules that do not compare distributions: an adversary's drafts carry none


class WrongFact(Scripted):
    """Drafts the target's own answer with one wrong token in it.

    Args:
        texts: prompt ids -> the target's greedy answer.
        tokenizer: to know the digits.
    """

    def __init__(self, texts: Texts, tokenizer: Any) -> None:
        super().__init__(texts, confidence=False)
        self._digits = digits(tokenizer)
        self._words = words(tokenizer)
        self._rng = random.Random(0)

    def spoilt(self, prompt: tuple[int, ...], done: int, tokens: list[int]) -> list[int]:
        places = [place for place, token in enumerate(tokens) if token in self._digits]
        place = self._rng.choice(places or range(len(tokens)))
        choice = self._digits if places else self._words
        tokens[place] = self._rng.choice([each for each in choice if each != tokens[place]])
        return tokens


def digits(tokenizer: Any) -> list[int]:
    """The tokens 0 to 9."""
    return [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]


def words(tokenizer: Any) -> list[int]:
    """Every token that is not special."""
    return [each for each in range(len(tokenizer)) if each not in tokenizer.all_special_ids]


def study(run: Run) -> list[Section]:
    """Accuracy, labels and adversaries."""
    plain = run.engines["none"]
    questions = accuracy.Questions(TASKS, run.limit or QUESTIONS)
    reference = questions.ask(plain)
    rows = [
        row
        for label, engine in run.engines.items()
        for row in accuracy.rows_of(label, reference if engine is plain else questions.ask(engine), reference)
    ]
    answers = {
        tuple(question_ids(plain, answer.example.prompt)): answer.token_ids
        for report in reference.values()
        for answer in report.answers
    }
    drafters = {
        "wrong fact": WrongFact(answers, plain.tokenizer),
        "random": Random(0, tree=False, full=True, tokens=words(plain.tokenizer)),
    }
    adverse: list[dict[str, Any]] = []
    for name, drafter in drafters.items():
        for method in _strictest_and_loosest(run.methods):
            rule = {key: value for key, value in method.config.items() if key not in ("model", "tree")}
            engine = plain.with_method({**rule, "method": drafter})
            adverse += accuracy.rows_of(f"{name}: {method.label}", questions.ask(engine), reference)
    sections = [
        accuracy.section("answers, minus those of plain decoding", rows),
        accuracy.section("answers with drafts of an adversary", adverse, "adversaries"),
    ]
    model = next((method.config["model"] for method in run.methods if "model" in method.config), None)
    count = len(TASKS) * run.limit if run.limit else MINED
    return sections if model is None else [*sections, _labels(plain, model, count)]


def _strictest_and_loosest(methods: Sequence[Method]) -> list[Method]:
    """The first and the last recipe of each rule that an adversary can be set against."""
    found: dict[str, list[Method]] = {}
    for method in methods:
        if method.config.get("verifier") in BEAR:
            found.setdefault(method.config["verifier"], []).append(method)
    return [method for each in found.values() for method in each[:1] + each[1:][-1:]]


def _labels(plain: Any, draft: str, count: int) -> Section:
    """What the head next to the target's weights says of newly mined labels at each threshold, by task."""
    head = learned_part.find(JudgeHead, None, plain.target)
    model = load(draft)
    mined = mine(plain, model, Mining(tasks=TASKS, count=count, held_out=True))
    labels = read_states(plain.target, mined.questions)
    draft_N3 = read_states(model, mined.questions).law_N3[labels.asked_N]
    labels = labels.of(labels.asked_N)
    score_N, without = head.judge(labels.hidden_ND), without_head(labels, draft_N3)
    rows = [
        {"threshold": threshold, "task": name, **quality(labels, score_N, threshold, without, name)}
        for threshold in sorted({head.config.threshold, *GRIDS["judge"][1]}, reverse=True)
        for name in labels.sources
    ]
    return Section("labels", "newly mined labels, and what the head says of them", LABELS, rows)


def _area(name: str, row: Mapping[str, Any]) -> Any:
    return row["auc_of"][name]


LABELS: Sequence[Column] = (
    Column("threshold", lambda row: row["threshold"], "{:.3f}"),
    Column("task", lambda row: row["task"]),
    Column("fine", lambda row: row["fine"], "{}"),
    Column("fine,\naccepted", lambda row: row["fine_accepted"], "{}"),
    Column("bad", lambda row: row["bad"], "{}"),
    Column("bad,\naccepted", lambda row: row["false_accepts"], "{}"),
    Column("AUC", lambda row: row["auc"], "{}"),
    *(
        Column(f"AUC of\n{name.replace('_', ' ')}", partial(_area, name))
        for name in ("p", "p_over_largest", "entropy", "q", "draft_entropy", "chance")
    ),
)


def _recipes(grids: Mapping[str, tuple[str, tuple[float, ...]]]) -> list[str]:
    return [f"{CHAIN}+verifier={rule}+{rule}.{knob}={value}" for rule, (knob, each) in grids.items() for value in each]


SUITE = Suite(
    name="judge",
    question="what does a judge's threshold trade, next to other relaxations, and how does it bear adversarial drafts?",
    draft_model="zoo:draft",
    methods=(f"{CHAIN}+verifier=auto", f"{CHAIN}+verifier=judge", *_recipes(GRIDS)),
    options={"repeats": 1},
    study=study,
)
