"""Ask the same questions of every point of a trade-off, interleaved: a slow minute of the machine slows all alike.

A block of a few questions goes to all points one after the other before the next block begins, and the order rotates
from block to block. Every repeat asks everything again with the same seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.core.errors import ForetokenError, InputError
from foretoken.core.metrics import Metrics
from foretoken.engine.llm import LLM
from foretoken.methods.entropy_adaptive.drafter import EntropyAdaptiveDrafter
from foretoken.methods.sprinter.drafter import SprinterDrafter
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import SamplingParams
from foretoken_lab.studies.tradeoff.points import EXACT, Point
from foretoken_lab.tasks.catalog import Task
from foretoken_lab.tasks.evaluate import Answer, evaluate
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.prompt_ids import question_ids

_BLOCK = 5  # questions of one point before the next point's turn, for each request that runs at a time
_WARM_UP = 2  # questions
_WARM_UP_TOKENS = 16
_OVER_A_MODEL = (SprinterDrafter, EntropyAdaptiveDrafter)  # made from options, a target and a loaded draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One block of questions at one point, in one repeat.

    Attributes:
        label: the point's.
        task: its name.
        seconds: wall time of generating.
        metrics: the block's counters.
        flops: of all forwards after the prompts; None where they are not all counted.
    """

    label: str
    task: str
    repeat: int
    answers: tuple[Answer, ...]
    seconds: float
    metrics: Metrics
    flops: float | None = None


@dataclass
class Trials:
    """The measurements: whole rounds only, so that every point has answered every question that is here.

    Attributes:
        trials: in the order of measurement.
        interrupted: questions or repeats are missing; repeats that were begun are dropped if one is whole.
    """

    trials: list[Trial] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Questions:
    """A task's examples and how they are to be answered."""

    task: Task
    examples: Sequence[Example]
    params: SamplingParams


def fitting(questions: Questions, llm: LLM, max_length: int) -> Questions:
    """Without the questions that do not fit the shortest context of all points together with an answer.

    Raises:
        InputError: none fits.
    """
    room = max_length - questions.params.max_tokens
    kept = [example for example in questions.examples if len(question_ids(llm, example.prompt)) <= room]
    if not kept:
        raise InputError(
            f"task '{questions.task.name}': no question fits a context of {max_length} tokens together with an answer "
            f"of {questions.params.max_tokens}: lower --max-tokens, or choose another task"
        )
    return replace(questions, examples=kept)


def measure(
    engines: Mapping[str, LLM],
    every: Sequence[Questions],
    *,
    repeats: int,
    scorer: LanguageModel,
    progress: Callable[[], None] | None = None,
) -> Trials:
    """Run everything.

    Args:
        engines: a point's label -> its engine.
        every: the tasks.
        repeats: number of repetitions.
        scorer: the target, which gives the nll of every output.
        progress: called for every answer.
    Returns:
        the trials; after Ctrl-C those of all complete rounds, marked as interrupted.
    """
    found = Trials()
    labels = list(engines)
    size = _BLOCK * engines[labels[0]].max_num_seqs
    rounds = [
        (questions, begin, begin + size) for questions in every for begin in range(0, len(questions.examples), size)
    ]
    try:
        for engine in engines.values():
            _warm_up(engine, every[0], scorer)
        for repeat in range(repeats):
            for number, (questions, begin, end) in enumerate(rounds):
                turn = (repeat + number) % len(labels)
                # the seed of a question does not depend on the block that it is in
                params = _seeded(questions.params, begin)
                this_round = []
                for label in labels[turn:] + labels[:turn]:
                    report = evaluate(
                        engines[label],
                        questions.task,
                        questions.examples[begin:end],
                        params,
                        scorer=scorer,
                        progress=progress,
                    )
                    this_round.append(
                        Trial(
                            label=label,
                            task=questions.task.name,
                            repeat=repeat,
                            answers=report.answers,
                            seconds=report.seconds,
                            metrics=report.metrics,
                            flops=report.flops,
                        )
                    )
                found.trials += this_round
    except KeyboardInterrupt:
        found.interrupted = True
        whole = len(rounds) * len(labels)
        if len(found.trials) > whole:
            found.trials = found.trials[: len(found.trials) // whole * whole]
    return found


def _warm_up(engine: LLM, questions: Questions, scorer: LanguageModel) -> None:
    params = replace(questions.params, max_tokens=min(questions.params.max_tokens, _WARM_UP_TOKENS))
    evaluate(engine, questions.task, questions.examples[:_WARM_UP], params, scorer=scorer)


def _seeded(params: SamplingParams, offset: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + offset) % 2**63)


def build_engines(
    llm: LLM, points: Sequence[Point], exact: Mapping[str, Any], skip: Callable[[Point, ForetokenError], None] | None
) -> dict[str, LLM]:
    """An engine for exact verification and for every lossy point, over one target.

    Points of one rule share their drafter or, where they differ in its options, its model: a draft model is loaded once
    for each rule.

    Args:
        llm: holds the target.
        points: those of a study; plain decoding and the draft alone get no engine here.
        exact: the ``speculative_config`` of exact verification.
        skip: called with a point if its rule does not fit the method, or lacks a learned part; the point is then left
            out. None: that is an error.
    Raises:
        ConfigError: the method refuses its options, or (without ``skip``) a rule.
        ModelError: a draft model, or (without ``skip``) a rule's learned part, cannot be had.
    """
    engines = {EXACT: llm.with_method(exact)}
    drawn: dict[str, str] = {}  # rule -> the label of its last engine
    for point in points:
        config = point.config(exact)
        if point.rule == EXACT and point.options:
            same = _with_drafter(config, {}, engines[EXACT])
            engines[point.label] = llm.with_method({**same, "verifier": config.get("verifier", "auto")})
            continue
        if not point.lossy:
            continue
        if point.rule in drawn:
            config = _with_drafter(config, point.options, engines[drawn[point.rule]])
        try:
            engine = llm.with_method(config)
        except ForetokenError as error:
            if skip is None:
                raise
            skip(point, error)
            continue
        drawn[point.rule] = point.label
        engines[point.label] = engine
    return engines


def _with_drafter(config: Mapping[str, Any], options: Mapping[str, Any], engine: LLM) -> dict[str, Any]:
    """The same recipe with the drafter of an engine, or another one like it over the same draft model."""
    drafter: Any = engine.recipe.drafter
    names = {each.name for each in dataclasses.fields(drafter.Config)}
    changed = {key: options[key] for key in names & options.keys() if options[key] != getattr(drafter.config, key)}
    if changed and (not isinstance(drafter, _OVER_A_MODEL) or "model" in changed):
        return dict(config)
    if changed:
        drafter = type(drafter)(replace(drafter.config, **changed), engine.target, drafter.model)
    rest = {key: value for key, value in config.items() if key not in names}  # an instance has its options already
    return {**rest, "method": drafter}
