"""Measure several methods on the same prompts, fairly: one clock, one token counter, interleaved order.

For every repeat and every group of prompts, all methods run one after the other, and the order rotates from group to
group. A slow minute of the machine then slows all methods alike, and none is always the first after another.

The clock is the wall time of one ``generate`` or ``chat`` call, so tokenization, prompt and bookkeeping count. The
counter is the length of ``token_ids``. A request that failed is a failure and never a data point.

The engine notes when each step's tokens came. Decoding begins where every prompt of a call has its first token, so that
reading prompts and decoding are told apart within the same call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from foretoken.core.metrics import Metrics
from foretoken.data.prompts import Prompt
from foretoken.options.sampling import SamplingParams

BASELINE = "none"
_WARM_UP_PROMPTS = 2
_WARM_UP_TOKENS = 32
_DONE = ("stop", "length")


@dataclass(frozen=True)
class Method:
    """One row of the benchmark.

    Attributes:
        label: how it is called in tables and files; unique.
        config: its ``speculative_config``.
    """

    label: str
    config: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The options, without the method's name."""
        return {key: value for key, value in self.config.items() if key != "method"}


class Engine(Protocol):
    """What the harness needs of ``foretoken.LLM``."""

    def generate(self, prompts: Any, params: Any = None, **options: Any) -> list[Any]: ...

    def chat(self, messages: Any, params: Any = None, **options: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Sample:
    """One prompt, one method, one repeat.

    Attributes:
        seconds: wall time of the call, divided evenly among the prompts of the group.
        tokens: what was generated; empty if it failed.
        error: why it failed, or None.
        first_token_seconds: until every prompt of the call had its first token, divided likewise; None: not known.
        decode_seconds: from there to the last token of the call, divided likewise.
        decode_tokens: of this prompt's answer, those that came in that time.
        counts: what the plan's counters rose by during the call, divided likewise.
    """

    label: str
    prompt: Prompt
    repeat: int
    seconds: float
    tokens: tuple[int, ...]
    metrics: Metrics
    error: str | None = None
    first_token_seconds: float | None = None
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Records:
    """All samples of a run.

    Attributes:
        samples: in the order of measurement; only rounds that every method finished, and only whole repeats if
            there is one.
        num_repeats: repeats that were asked for.
        interrupted: the run was cut short, so repeats or prompts are missing.
    """

    samples: list[Sample] = field(default_factory=list)
    num_repeats: int = 1
    interrupted: bool = False


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        prompts: the suite.
        params: sampling parameters of every prompt; a seed is shifted by prompt and repeat, equally for all methods.
        repeats: how often everything runs.
        batch_size: prompts per call; groups never mix categories, so that times by category add up.
        chat: apply the chat template.
        counters: name -> a number that only rises, read before and after every timed call.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    repeats: int = 3
    batch_size: int = 1
    chat: bool = False
    counters: Mapping[str, Callable[[], float]] = field(default_factory=dict)

    def groups(self) -> list[list[Prompt]]:
        """Prompts that run together: neighbours of one category, at most ``batch_size`` of them."""
        by_category: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_category.setdefault(prompt.category, []).append(prompt)
        size = self.batch_size
        return [group[i : i + size] for group in by_category.values() for i in range(0, len(group), size)]


def measure(engines: Mapping[str, Engine], plan: Plan, *, progress: Callable[[str], None] | None = None) -> Records:
    """Run the plan.

    Args:
        engines: label -> engine, the baseline among them.
        plan: what to run.
        progress: called with the method's label after every group of prompts of that method.
    Returns:
        the samples; after Ctrl-C those of all complete rounds, marked as interrupted.
    """
    records = Records(num_repeats=plan.repeats)
    labels = list(engines)
    offsets = {id(prompt): i for i, prompt in enumerate(plan.prompts)}
    groups = plan.groups()
    try:
        for label in labels:
            _warm_up(engines[label], plan)
        for repeat in range(plan.repeats):
            for number, group in enumerate(groups):
                params = [_seeded(plan.params, offsets[id(prompt)] + repeat * len(plan.prompts)) for prompt in group]
                turn = (repeat + number) % len(labels)
                this_round: list[Sample] = []
                for label in labels[turn:] + labels[:turn]:
                    this_round += _measure_group(engines[label], label, group, params, repeat, plan)
                    if progress is not None:
                        progress(label)
                records.samples += this_round
    except KeyboardInterrupt:
        records.interrupted = True
        whole = len(plan.prompts) * len(labels)
        if len(records.samples) > whole:  # with a whole repeat at hand, a part of the next would only skew medians
            records.samples = records.samples[: len(records.samples) // whole * whole]
    return records


def _warm_up(engine: Engine, plan: Plan) -> None:
    params = replace(plan.params, max_tokens=min(plan.params.max_tokens, _WARM_UP_TOKENS), min_tokens=0)
    group = list(plan.prompts[:_WARM_UP_PROMPTS])
    _run_group(engine, "", group, [params] * len(group), 0, plan.chat)


def _measure_group(
    engine: Engine, label: str, group: Sequence[Prompt], params: list[SamplingParams], repeat: int, plan: Plan
) -> list[Sample]:
    """The timed call with what its counters say."""
    before = {name: read() for name, read in plan.counters.items()}
    samples = _run_group(engine, label, group, params, repeat, plan.chat)
    counts = {name: (read() - before[name]) / len(group) for name, read in plan.counters.items()}
    return [replace(sample, counts=counts) for sample in samples]


def _seeded(params: SamplingParams, offset: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + offset) % 2**63)


def _run_group(
    engine: Engine, label: str, group: Sequence[Prompt], params: list[SamplingParams], repeat: int, chat: bool
) -> list[Sample]:
    started = time.perf_counter()
    try:
        if chat:
            outputs = engine.chat([[{"role": "user", "content": prompt.text}] for prompt in group], params)
        else:
            outputs = engine.generate([prompt.text for prompt in group], params)
    except Exception as error:  # one method failing must not cost the others their measurements
        message = f"{type(error).__name__}: {error}"
        return [Sample(label, prompt, repeat, 0.0, (), Metrics(), message) for prompt in group]
    seconds = (time.perf_counter() - started) / len(group)
    came = [output.metrics.emitted for output in outputs if output.metrics.emitted]
    read = max((steps[0].seconds for steps in came), default=None)
    ended = max((steps[-1].seconds for steps in came), default=0.0)
    samples = []
    for prompt, output in zip(group, outputs, strict=True):
        failed = output.error or (None if output.finish_reason in _DONE else f"finished as {output.finish_reason}")
        tokens = () if failed else tuple(output.token_ids)
        sample = Sample(label, prompt, repeat, seconds, tokens, output.metrics, failed)
        if read is not None and not failed:
            behind = sum(step.tokens for step in output.metrics.emitted if step.seconds > read)
            share = 1 / len(group)
            sample = replace(
                sample, first_token_seconds=read * share, decode_seconds=(ended - read) * share, decode_tokens=behind
            )
        samples.append(sample)
    return samples
