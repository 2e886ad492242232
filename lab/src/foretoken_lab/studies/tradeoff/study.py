"""Quality against speed over the knob of every lossy rule, with intervals, the Pareto front and advice.

Quality is compared question by question with exact verification: what makes a question hard for both cancels out. It
is taken from the first repeat; further repeats ask the same with the same seeds, and are there for the clock.

Speed is the median over repeats, with the range next to it, not an interval of confidence: the lowest and the highest
repeat. Ratios are taken within a repeat, where all points ran interleaved. Whether a point is faster
than exact verification is judged by more: by every repeat, and by the interval over the blocks of questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any

from foretoken.core.metrics import Metrics
from foretoken_lab.intervals import mean_interval, wilson_interval
from foretoken_lab.studies.tradeoff.pareto import pareto_front
from foretoken_lab.studies.tradeoff.points import DRAFT, EXACT, PLAIN, Point
from foretoken_lab.studies.tradeoff.run import Trial
from foretoken_lab.tasks.difference import Difference, paired_difference
from foretoken_lab.tasks.evaluate import Answer

Interval = tuple[float, float]
Key = tuple[str, str]  # task, example

_CORRECT = "correct"
_ROUGE = "rougeL"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several repeats, the lowest and the highest; all the same where there is one."""

    middle: float
    low: float
    high: float
    num_repeats: int

    @property
    def ranged(self) -> bool:
        """Whether there is a range: one repeat says nothing about the next."""
        return self.num_repeats > 1


@dataclass(frozen=True, slots=True)
class Gain:
    """A mean difference from exact verification, paired by question; no interval with fewer than two questions."""

    mean: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Quality:
    """What the outputs at one point are worth, over the questions that were answered without an error.

    Attributes:
        num_questions: of all kinds.
        num_judged: of tasks that know right and wrong.
        accuracy, interval: share of right answers and Wilson's 95 % interval; None if nothing is judged.
        difference: accuracy minus that of exact verification, paired (Newcombe, 95 %); None at exact itself.
        nll: negative log-likelihood per output token under the target, in nats.
        nll_gain: nll minus that of exact verification on the same questions; the interval is that of a difference of
            two ratios (of summed nll to summed tokens), linearised, with questions as the independent units.
        measures: means of the tasks' other measures (f1, rougeL ...).
        gains: measure -> difference from exact verification.
    """

    num_questions: int
    num_judged: int
    accuracy: float | None
    interval: Interval | None
    difference: Difference | None
    nll: float | None
    nll_gain: Gain | None
    measures: Mapping[str, float]
    gains: Mapping[str, Gain]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point with its figures.

    Attributes:
        quality: over all tasks; by_task: over each.
        tokens_per_step: None for the draft alone, which calls no target.
        target_calls: per 100 tokens.
        tokens_per_second, against_plain, against_exact: the clock, and its ratios within the same repeat. Exact
            verification is that of the draft length at which it was fastest.
        gain_in_speed: the ratio to exact verification over all repeats, with the 95 % interval of its linearised
            logarithm over the blocks of questions, the independent units. None at the exact row that is compared with.
        flops_per_token: counted, of target and drafter after the prompt; see
            :class:`foretoken_lab.tasks.evaluate.Report`. None where the drafter does not count its own.
        distortion, kl: the meter's, per token; None for the draft alone, which it does not see.
        mean_tokens: length of an answer.
        modelled: times plain decoding while decoding, by the planner's cost model; None where it is not known.
        truncated, failed: answers cut at their limit; requests that ended in an error.
    """

    point: Point
    quality: Quality
    by_task: Mapping[str, Quality]
    tokens_per_step: float | None
    target_calls: float
    tokens_per_second: Spread
    against_plain: Spread
    against_exact: Spread
    gain_in_speed: Gain | None
    flops_per_token: float | None
    distortion: float | None
    kl: float | None
    mean_tokens: float
    truncated: int
    failed: int
    modelled: float | None = None

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        point = self.point
        return {
            "label": point.label,
            "rule": point.rule,
            "knob": point.knob or None,
            "value": point.value,
            "options": dict(point.options),
            "drafter": None if point.own is None else dict(point.own),
            "on_budget": point.on_budget,
            **_quality_fields(self.quality),
            "by_task": {name: _quality_fields(each) for name, each in self.by_task.items()},
            "tokens_per_step": self.tokens_per_step,
            "target_calls_per_100_tokens": self.target_calls,
            "tokens_per_second": _spread_fields(self.tokens_per_second),
            "speed_against_plain": _spread_fields(self.against_plain),
            "speed_against_exact": _spread_fields(self.against_exact),
            "speed_against_exact_by_block": self.gain_in_speed and asdict(self.gain_in_speed),
            "speed_against_plain_by_costs": self.modelled,
            "flops_per_token": self.flops_per_token,
            "distortion": self.distortion,
            "kl": self.kl,
            "mean_tokens": self.mean_tokens,
            "truncated": self.truncated,
            "failed": self.failed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """All points of one sampling setting.

    Attributes:
        rows: in the order of the points: plain, draft, exact, then the rules.
        measure: what the fronts call quality: "accuracy", "rougeL", or "nll" where tasks have neither.
        fronts: "tokens_per_second", "tokens_per_step" and "flops_per_token" (the fewer the better) -> indices of rows
            on the Pareto front of estimates.
    """

    temperature: float
    num_repeats: int
    rows: tuple[Row, ...]
    measure: str
    fronts: Mapping[str, tuple[int, ...]]

    @property
    def exact(self) -> Row | None:
        """The row that speeds are compared with: exact verification at its fastest."""
        return next((row for row in self.rows if row.point.rule == EXACT and row.gain_in_speed is None), None)

    def row(self, rule: str) -> Row | None:
        """The row of a point without a knob."""
        return next((row for row in self.rows if row.point.label == rule), None)

    def fields(self) -> dict[str, Any]:
        """As JSON, without the advice."""
        return {
            "temperature": self.temperature,
            "num_repeats": self.num_repeats,
            "quality_measure": self.measure,
            "points": [row.fields() for row in self.rows],
            "pareto": {name: [self.rows[index].point.label for index in front] for name, front in self.fronts.items()},
        }


def tradeoff(
    points: Sequence[Point],
    trials: Sequence[Trial],
    temperature: float,
    modelled: Mapping[str, float] = MappingProxyType({}),
) -> Tradeoff:
    """Compute figures from the measurements.

    Args:
        points: exact verification and plain decoding among them; those without trials are left out.
        trials: whole rounds, as :func:`foretoken_lab.studies.tradeoff.run.measure` gives them.
        temperature: to be named in the result.
        modelled: a point's label -> times plain decoding by the cost model.
    """
    by_label: dict[str, list[Trial]] = {}
    for trial in trials:
        by_label.setdefault(trial.label, []).append(trial)
    known = [point for point in points if point.label in by_label]
    exact, plain = by_label[EXACT], by_label[PLAIN]
    of_exact = [by_label[point.label] for point in known if point.rule == EXACT]
    fastest = max(of_exact, key=lambda trials: median(_speeds(trials).values()))
    rows = tuple(
        replace(_row(point, by_label[point.label], exact, fastest, plain), modelled=modelled.get(point.label))
        for point in known
    )
    measure = _measure(rows)
    return Tradeoff(
        temperature=temperature,
        num_repeats=len({trial.repeat for trial in trials}),
        rows=rows,
        measure=measure,
        fronts={
            "tokens_per_second": _front(rows, measure, lambda row: row.against_plain.middle),
            "tokens_per_step": _front(rows, measure, lambda row: row.tokens_per_step),
            "flops_per_token": _front(
                rows, measure, lambda row: None if row.flops_per_token is None else -row.flops_per_token
            ),
        },
    )


def measures(study: Tradeoff) -> list[str]:
    """Quality measures of a row, the main measure first."""
    names = dict.fromkeys((study.measure, "accuracy", _ROUGE, "nll"))
    return [name for name in names if any(quality_value(row, name) is not None for row in study.rows)]


def quality_value(row: Row, measure: str) -> float | None:
    """The figure that the fronts call quality; higher is better."""
    if measure == "accuracy":
        return row.quality.accuracy
    if measure == "nll":
        return None if row.quality.nll is None else -row.quality.nll
    return row.quality.measures.get(measure)


def quality_gain(row: Row, measure: str) -> Gain | None:
    """Its difference from exact verification, higher is better; None at exact itself."""
    quality = row.quality
    if measure == "accuracy":
        found = quality.difference
        return None if found is None else Gain(found.mean, (found.low, found.high))
    if measure == "nll":
        gain = quality.nll_gain
        return gain and Gain(-gain.mean, gain.interval and (-gain.interval[1], -gain.interval[0]))
    return quality.gains.get(measure)


def _row(
    point: Point, own: Sequence[Trial], exact: Sequence[Trial], fastest: Sequence[Trial], plain: Sequence[Trial]
) -> Row:
    """The figures of a point; quality is compared with ``exact``, speed with exact verification at its fastest."""
    first = [trial for trial in own if trial.repeat == 0]
    metrics = Metrics()
    for trial in first:
        metrics.add(trial.metrics)
    answers, others = _answers(first), _answers(trial for trial in exact if trial.repeat == 0)
    compared = {} if point.rule == EXACT else others
    alone = point.rule == DRAFT  # its steps are not calls of the target
    good = [answer for answer in answers.values() if answer.error is None]
    speeds = _speeds(own)
    return Row(
        point=point,
        quality=_quality(answers, compared),
        by_task={
            task: _quality(_of_task(answers, task), _of_task(compared, task))
            for task in dict.fromkeys(task for task, _ in answers)
        },
        tokens_per_step=None if alone else metrics.tokens_per_step,
        target_calls=0.0 if alone else 100.0 * metrics.num_steps / max(1, metrics.num_tokens),
        tokens_per_second=_spread(list(speeds.values())),
        against_plain=_ratio(speeds, _speeds(plain)),
        against_exact=_ratio(speeds, _speeds(fastest)),
        gain_in_speed=None if own is fastest else _by_block(own, fastest),
        flops_per_token=_flops(first),
        distortion=None if alone else metrics.distortion,
        kl=None if alone else metrics.kl,
        mean_tokens=sum(len(answer.token_ids) for answer in good) / max(1, len(good)),
        truncated=sum(answer.finish_reason == "length" for answer in good),
        failed=len(answers) - len(good),
    )


def _flops(trials: Sequence[Trial]) -> float | None:
    """Per token; None if one block was not counted."""
    counted = [trial.flops for trial in trials if trial.flops is not None]
    num_tokens = sum(trial.metrics.num_tokens for trial in trials)
    return sum(counted) / num_tokens if num_tokens and len(counted) == len(trials) else None


def _answers(trials: Iterable[Trial]) -> dict[Key, Answer]:
    return {(trial.task, answer.example.id): answer for trial in trials for answer in trial.answers}


def _of_task(answers: Mapping[Key, Answer], task: str) -> dict[Key, Answer]:
    return {key: answer for key, answer in answers.items() if key[0] == task}


def _quality(answers: Mapping[Key, Answer], others: Mapping[Key, Answer]) -> Quality:
    """Figures of the answers, and their differences from the others where there are any."""
    good = [answer for answer in answers.values() if answer.error is None]
    pairs = [
        (answer, others[key])
        for key, answer in answers.items()
        if answer.error is None and key in others and others[key].error is None
    ]
    judged = [answer for answer in good if _CORRECT in answer.scores]
    judged_pairs = [pair for pair in pairs if _CORRECT in pair[0].scores]
    names = dict.fromkeys(name for answer in good for name in answer.scores if name != _CORRECT)
    num_correct = sum(answer.correct for answer in judged)
    num_tokens = sum(len(answer.token_ids) for answer in good)
    gains = {
        name: _gain([own.scores[name] - other.scores[name] for own, other in pairs if name in own.scores])
        for name in names
    }
    return Quality(
        num_questions=len(good),
        num_judged=len(judged),
        accuracy=num_correct / len(judged) if judged else None,
        interval=wilson_interval(num_correct, len(judged)) if judged else None,
        difference=paired_difference(
            [own.correct for own, _ in judged_pairs], [other.correct for _, other in judged_pairs]
        )
        if judged_pairs
        else None,
        nll=sum(answer.nll for answer in good) / num_tokens if num_tokens else None,
        nll_gain=_nll_gain(pairs),
        measures={name: _mean([answer.scores[name] for answer in good if name in answer.scores]) for name in names},
        gains={name: gain for name, gain in gains.items() if gain is not None},
    )


def _nll_gain(pairs: Sequence[tuple[Answer, Answer]]) -> Gain | None:
    if not pairs:
        return None
    own, other = (_nll_terms(each) for each in zip(*pairs, strict=True))
    return _gain([a - b for a, b in zip(own, other, strict=True)])


def _nll_terms(answers: Sequence[Answer]) -> list[float]:
    """One value per answer: their mean is the nll per token, their spread that of its linearised estimate."""
    num_tokens = [len(answer.token_ids) for answer in answers]
    typical = max(_mean(num_tokens), 1.0)
    ratio = sum(answer.nll for answer in answers) / max(sum(num_tokens), 1)
    return [ratio + (answer.nll - ratio * n) / typical for answer, n in zip(answers, num_tokens, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _gain(values: Sequence[float]) -> Gain | None:
    return Gain(*mean_interval(values)) if values else None


def _speeds(trials: Sequence[Trial]) -> dict[int, float]:
    """Repeat -> tokens per second."""
    speeds = {}
    for repeat in dict.fromkeys(trial.repeat for trial in trials):
        part = [trial for trial in trials if trial.repeat == repeat]
        seconds = sum(trial.seconds for trial in part)
        speeds[repeat] = sum(trial.metrics.num_tokens for trial in part) / seconds if seconds > 0 else 0.0
    return speeds


def _ratio(own: Mapping[int, float], other: Mapping[int, float]) -> Spread:
    return _spread([speed / other[repeat] for repeat, speed in own.items() if other.get(repeat, 0.0) > 0.0])


def _by_block(own: Sequence[Trial], exact: Sequence[Trial]) -> Gain | None:
    ours, theirs = _block_totals(own), _block_totals(exact)
    totals = [[sum(column) for column in zip(*each.values(), strict=True)] for each in (ours, theirs)]
    if not all(total > 0 for each in totals for total in each):
        return None
    (num, seconds), (num_exact, seconds_exact) = totals
    log_ratio = math.log(num / seconds * seconds_exact / num_exact)
    terms = []
    for block, (n, time) in ours.items():
        n_exact, time_exact = theirs[block]
        deviation = n / num - time / seconds - n_exact / num_exact + time_exact / seconds_exact
        terms.append(log_ratio + len(ours) * deviation)
    mean, ends = mean_interval(terms)
    return Gain(math.exp(mean), ends and (math.exp(ends[0]), math.exp(ends[1])))


def _block_totals(trials: Sequence[Trial]) -> dict[tuple[str, ...], tuple[int, float]]:
    """Block -> its tokens and seconds over all repeats."""
    totals: dict[tuple[str, ...], tuple[int, float]] = {}
    for trial in trials:
        key = (trial.task, *(answer.example.id for answer in trial.answers))
        num_tokens, seconds = totals.get(key, (0, 0.0))
        totals[key] = num_tokens + trial.metrics.num_tokens, seconds + trial.seconds
    return totals


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values), len(values)) if values else Spread(0.0, 0.0, 0.0, 0)


def _measure(rows: Sequence[Row]) -> str:
    if any(row.quality.accuracy is not None for row in rows):
        return "accuracy"
    return _ROUGE if any(_ROUGE in row.quality.measures for row in rows) else "nll"


def _front(rows: Sequence[Row], measure: str, speed: Callable[[Row], float | None]) -> tuple[int, ...]:
    places = [(index, speed(row), quality_value(row, measure)) for index, row in enumerate(rows)]
    known = [(index, x, y) for index, x, y in places if x is not None and y is not None]
    return tuple(known[place][0] for place in pareto_front([(x, y) for _, x, y in known]))


def _quality_fields(quality: Quality) -> dict[str, Any]:
    return {
        "num_questions": quality.num_questions,
        "num_judged": quality.num_judged,
        "accuracy": quality.accuracy,
        "interval": quality.interval,
        "difference": quality.difference and asdict(quality.difference),
        "nll": quality.nll,
        "nll_difference": quality.nll_gain and asdict(quality.nll_gain),
        "measures": dict(quality.measures),
        "differences": {name: asdict(gain) for name, gain in quality.gains.items()},
    }


def _spread_fields(spread: Spread) -> dict[str, Any]:
    return {"median": spread.middle, "low": spread.low, "high": spread.high, "num_repeats": spread.num_repeats}
