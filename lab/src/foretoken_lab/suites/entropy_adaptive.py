"""Entropy-adaptive decoding on tasks, next to its four controls, all of them in one run and task by task.

For every threshold: the writer of each token is recorded, and then two controls get the same share of the large model:

* random: turns as long as those noted in the same task, in random order and of other questions, blind to the text; the
  mean of ``SEEDS`` orders, with the mean of their intervals, which is no narrower than that of one. The variants have
  random turns of their own, which are compared with them;
* position: the large model writes the first tokens of every answer, as many as it wrote in the mean.

The other two are its limits: the small model alone (an infinite threshold) and the large one alone (plain decoding).
Next to them are lossless drafting with the same pair, which loses no quality, and two variants of the method:
without window and dwell, and with the other reading of where a switch holds (``redo``). All answers are greedy.

The share written by the large model is that of tokens; what a method saves of its calls is another figure, as the
target reads every token for the meter.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from foretoken.bench.suite import Column, Run, Section, Suite
from foretoken.core.protocols import Context, Outcome
from foretoken.methods.entropy_adaptive.drafter import EntropyAdaptiveDrafter
from foretoken.methods.entropy_adaptive.turns import Turn, Turns
from foretoken.models.language_model import LanguageModel
from foretoken_lab.suites import accuracy
from foretoken_lab.tasks.difference import paired_difference
from foretoken_lab.tasks.evaluate import Report

TASKS = ("code", "profiles", "json", "arithmetic")
QUESTIONS = 40  # of each task, without --limit
THRESHOLDS = (0.1, 0.5)
VARIANTS: dict[str, dict[str, Any]] = {"no window, no dwell": {"window": 1, "dwell": 1}, "redo=False": {"redo": False}}
SEEDS = 5
NODES = 6  # of a lossless draft
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The turn of a control: the writer of each token of an answer is fixed beforehand."""

    writers: Sequence[bool]
    position: int = 0

    @property
    def large(self) -> bool:
        """Whether the large model writes."""
        return self.writers[min(self.position, len(self.writers) - 1)]

    def read_by_small(self, entropy: float) -> tuple[bool, Scheduled]:
        """It is its turn, whatever the entropy."""
        return True, Scheduled(self.writers, self.position + 1)

    def read_by_large(self, entropy: float) -> Scheduled:
        """Likewise."""
        return Scheduled(self.writers, self.position + 1)


@dataclass
class Noted:
    """The author of each token: a list for each answer, True for the large model."""

    answers: dict[int, list[bool]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the large model."""
        written = [each for answer in self.answers.values() for each in answer]
        return sum(written) / max(1, len(written))

    def runs(self, large: bool) -> list[int]:
        """Lengths of one model's turns."""
        return [
            len(list(run)) for answer in self.answers.values() for who, run in itertools.groupby(answer) if who is large
        ]

    @property
    def switches(self) -> float:
        """Changes of the writer in an answer, mean."""
        runs = len(self.runs(True)) + len(self.runs(False))
        return (runs - len(self.answers)) / max(1, len(self.answers))

    @property
    def first(self) -> float:
        """The share of answers that the large model begins."""
        return sum(answer[0] for answer in self.answers.values()) / max(1, len(self.answers))


class Watched(EntropyAdaptiveDrafter):
    """The drafter, taking notes, and on demand with scheduled turns."""

    noted: Noted = Noted()
    schedule: Any = None  # seed -> the writer of each token

    def first_turn(self, context: Context) -> Turn:
        if self.schedule is None:
            return super().first_turn(context)
        return Scheduled(self.schedule(context.request_id))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            answer = self.noted.answers.setdefault(outcome.request_id, [])
            turns = outcome.draft.evidence
            by_small = len(outcome.tokens) - 1
            if isinstance(turns, Turns) and not turns.yields:
                by_small += 1
            answer += [number >= by_small for number in range(len(outcome.tokens))]


def random_turns(noted: Noted, seed: int, number: int) -> list[bool]:
    """Turns drawn from those noted, one of each model after the other, for one answer."""
    rng = random.Random(f"{seed} {number}")
    runs = {large: noted.runs(large) for large in (True, False)}
    if not runs[True] or not runs[False]:
        return [bool(runs[True])]
    large = rng.random() < noted.first
    writers: list[bool] = []
    while len(writers) < _LONGEST:
        writers += [large] * rng.choice(runs[large])
        large = not large
    return writers


def first_tokens(noted: Noted, number: int) -> list[bool]:
    """The large model writes the first tokens, as many as it wrote of an answer in the mean."""
    written = sum(map(sum, noted.answers.values())) / max(1, len(noted.answers))
    return [True] * round(written) + [False]


def study(run: Run) -> list[Section]:
    """The table of answers."""
    plain = run.engines["none"]
    model = next(method.config["model"] for method in run.methods if "model" in method.config)
    questions = accuracy.Questions(TASKS, run.limit or QUESTIONS)
    run.progress("large alone")
    reference = questions.ask(plain)
    rows = _rows("large alone", reference, reference, {})
    run.progress("lossless drafting")
    # of a fixed length: an adaptive one drafts nothing where that does not pay, and here calls are compared
    lossless = plain.with_method({"method": "draft_model", "model": model, "num_speculative_tokens": NODES})
    rows += _rows("lossless drafting", questions.ask(lossless), reference, {})
    run.progress("small alone")
    drafter = Watched(Watched.Config(model=model, threshold=math.inf), plain.target)
    small = questions.ask(plain.with_method({"method": drafter}))
    rows += _rows("small alone", small, reference, dict.fromkeys(small, 0.0))
    for threshold in THRESHOLDS:
        rows += _threshold(run, drafter, threshold, questions, reference)
    ratio = drafter.model.num_parameters / plain.target.num_parameters
    for row in rows:  # the paper's cost: parameters of the writer of a token over those of the large model
        row["cost"] = row["share_of_large"] + (1 - row["share_of_large"]) * ratio
    return [Section("turns", "entropy-adaptive decoding and its controls, greedy answers", COLUMNS, rows)]


def _threshold(
    run: Run, drafter: Watched, threshold: float, questions: accuracy.Questions, reference: dict[str, Report]
) -> list[dict[str, Any]]:
    """One threshold, its variants and its two controls, the rates of every task apart."""

    def ask(
        task: str, schedule: Callable[[int], list[bool]] | None = None, **options: Any
    ) -> tuple[dict[str, Report], Noted]:
        plain = run.engines["none"]
        own = _watched(drafter, plain.target, schedule, threshold=threshold, **options)
        return questions.ask(plain.with_method({"method": own}), only=task), own.noted

    def rows_of(
        found: dict[str, Report], its: Noted, task: str, entropy: dict[str, Report] | None = None
    ) -> list[dict[str, Any]]:
        return [{**row, "switches": its.switches} for row in _rows("", found, reference, {task: its.share}, entropy)]

    rows: dict[str, list[dict[str, Any]]] = {}
    for task in reference:
        run.progress(f"threshold={threshold:g}, {task}")
        entropy, noted = ask(task)
        rows.setdefault(f"threshold={threshold:g}", []).extend(rows_of(entropy, noted, task))
        methods = {"": (entropy, noted)}
        for name, options in VARIANTS.items():
            found, its = ask(task, **options)
            rows.setdefault(f"  {name}", []).extend(rows_of(found, its, task, entropy))
            methods[f", {name}"] = (found, its)
        for name, (method, written) in methods.items():
            orders = []
            for seed in range(SEEDS):
                found, its = ask(task, partial(random_turns, written, seed))
                orders += rows_of(found, its, task, method)
            rows.setdefault(f"  random{name}", []).append(_mean(orders))
        found, its = ask(task, partial(first_tokens, noted))
        rows.setdefault("  position", []).extend(rows_of(found, its, task, entropy))
    return [{**row, "method": name} for name, each in rows.items() for row in each]


def _watched(drafter: Watched, target: LanguageModel, schedule: Any, **options: Any) -> Watched:
    """Another drafter with some options changed, over the same small model."""
    made = Watched(replace(drafter.config, **options), target, drafter.model)
    made.noted, made.schedule = Noted(), schedule
    return made


def _rows(
    label: str,
    found: dict[str, Report],
    reference: dict[str, Report],
    shares: dict[str, float],
    entropy: dict[str, Report] | None = None,
) -> list[dict[str, Any]]:
    """A row a task: minus the large model, and of a control or variant minus the method that it belongs to.

    Args:
        shares: of tokens that the large model wrote; all, where a task is not named.
    """
    rows = []
    for task, report in found.items():
        right = [answer.correct for answer in report.answers]
        rows.append(
            {
                "method": label,
                "task": task,
                "accuracy": report.accuracy,
                "interval": None if report.interval is None else list(report.interval),
                "minus_large": _minus(right, reference[task]),
                "minus_entropy": None if entropy is None else _minus(right, entropy[task]),
                "share_of_large": shares.get(task, 1.0),
                "switches": None,
                "seconds_per_answer": report.metrics.seconds / len(report.answers),
                "distortion": report.distortion,
                "target_calls_per_100_tokens": 100 * report.metrics.num_steps / max(1, report.metrics.num_tokens),
                "target_calls_per_right_answer": report.metrics.num_steps / sum(right) if any(right) else None,
                "mean_tokens": report.mean_tokens,
                "failed": report.failed,
            }
        )
    return rows


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several: means, of intervals those of their ends; None where one has none."""

    def mean(values: Sequence[Any]) -> Any:
        if any(each is None for each in values):
            return None
        if isinstance(values[0], list):
            return [mean(each) for each in zip(*values, strict=True)]
        return sum(values) / len(values)

    told = {"method": rows[0]["method"], "task": rows[0]["task"], "failed": sum(row["failed"] for row in rows)}
    return {name: told[name] if name in told else mean([row[name] for row in rows]) for name in rows[0]}


def _minus(right: Sequence[bool], other: Report) -> list[float]:
    found = paired_difference(right, [answer.correct for answer in other.answers])
    return [found.mean, found.low, found.high]


def _difference(name: str) -> Any:
    def cell(row: Any) -> str | None:
        if row[name] is None:
            return None
        mean, low, high = row[name]
        return f"{mean:+.0%} ({low:+.0%} to {high:+.0%})"

    return cell


COLUMNS = (
    Column("method", lambda row: row["method"]),
    Column("task", lambda row: row["task"]),
    Column("right", lambda row: row["accuracy"], "{:.0%}"),
    Column("- large, 95 %", _difference("minus_large")),
    Column("- entropy, 95 %", _difference("minus_entropy")),
    Column("by\nlarge", lambda row: row["share_of_large"], "{:.0%}"),
    Column("cost", lambda row: row["cost"], "{:.2f}"),
    Column("switches", lambda row: row["switches"], "{:.1f}"),
    Column("s/answer", lambda row: row["seconds_per_answer"], "{:.2f}"),
    Column("TV", lambda row: row["distortion"], "{:.3f}"),
    Column("calls\n/100", lambda row: row["target_calls_per_100_tokens"], "{:.0f}"),
    Column("calls\n/right", lambda row: row["target_calls_per_right_answer"], "{:.1f}"),
    Column("tokens", lambda row: row["mean_tokens"], "{:.0f}"),
    Column("failed", lambda row: row["failed"], "{}"),
)

SUITE = Suite(
    name="entropy_adaptive",
    question="does entropy say when a small model may write: next to random turns, the first tokens, and either alone?",
    draft_model="zoo:draft",
    methods=("draft_model", *(f"entropy_adaptive+threshold={value}" for value in THRESHOLDS)),
    options={"repeats": 1},
    study=study,
)
