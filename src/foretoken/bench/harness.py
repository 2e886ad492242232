"""Measure several methods on the same prompts, fairly: one clock, one token counter, interleaved order.

For every repeat and every batch of prompts, all methods run in turn, and the order rotates from batch to batch. A slow
minute of the machine then affects all methods equally, and no method always follows the same other one.

The clock is the wall time of one ``generate`` or ``chat`` call, so tokenization, prompt and bookkeeping count. The
counter is the length of ``token_ids``. A request that failed is a failure and never a data point.

The engine records the time of each step's tokens. Decoding begins when every prompt of a call has its first token; this
separates prefill from decoding within the same call.
"""

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
        label: its unique name in tables and files.
        config: its ``speculative_config``.
    """

    label: str
    config: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options, without the method's name."""
        return {key: value for key, value in self.config.items() if key != "method"}


class Engine(Protocol):
    """The part of ``foretoken.LLM`` that the harness uses."""

    def generate(self, prompts: Any, params: Any = None, **options: Any) -> list[Any]: ...

    def chat(self, messages: Any, params: Any = None, **options: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Sample:
    """The measurement of one prompt, one method and one repeat.

    Attributes:
        seconds: wall time of the call, divided evenly among the prompts of the group.
        tokens: the generated tokens; empty if it failed.
        error: reason of the failure, or None.
        first_token_seconds: time until every prompt of the call had its first token, divided likewise; None: unknown.
        decode_seconds: time from then to the last token of the call, divided likewise.
        decode_tokens: number of this prompt's tokens in that time.
        counts: increase of the plan's counters during the call, divided likewise.
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
        num_repeats: requested repeats.
        interrupted: the run was cut short, so repeats or prompts are missing.
    """

    samples: list[Sample] = field(default_factory=list)
    num_repeats: int = 1
    interrupted: bool = False


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        prompts: the suite.
        params: sampling parameters of every prompt; a seed is shifted by prompt and repeat, equally for all methods.
        repeats: number of repeats.
        batch_size: prompts per call; batches never mix categories, so that times by category add up.
        chat: apply the chat template.
        counters: name -> a monotonic counter, read before and after every timed call.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    repeats: int = 3
    batch_size: int = 1
    chat: bool = False
    counters: Mapping[str, Callable[[], float]] = field(default_factory=dict)

    def groups(self) -> list[list[Prompt]]:
        """Split the prompts into batches: consecutive prompts of one category, at most ``batch_size``."""
        by_category: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_category.setdefault(prompt.category, []).append(prompt)
        size = self.batch_size
        return [group[i : i + size] for group in by_category.values() for i in range(0, len(group), size)]


def measure(engines: Mapping[str, Engine], plan: Plan, *, progress: Callable[[str], None] | None = None) -> Records:
    """Run the plan.

    Args:
        engines: label -> engine, the baseline among them.
        plan: the settings.
        progress: called with the method's label after every batch of that method.
    Returns:
        the samples; after Ctrl-C, those of all complete rounds, marked as interrupted.
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
                    this_round += _run_group(engines[label], label, group, params, repeat, plan)
                    if progress is not None:
                        progress(label)
                records.samples += this_round
    except KeyboardInterrupt:
        records.interrupted = True
        whole = len(plan.prompts) * len(labels)
        if len(records.samples) > whole:  # after a whole repeat, part of the next one would only bias the medians
            records.samples = records.samples[: len(records.samples) // whole * whole]
    return records


def _warm_up(engine: Engine, plan: Plan) -> None:
    params = replace(plan.params, max_tokens=min(plan.params.max_tokens, _WARM_UP_TOKENS), min_tokens=0)
    group = list(plan.prompts[:_WARM_UP_PROMPTS])
    _run_group(engine, "", group, [params] * len(group), 0, plan)


def _seeded(params: SamplingParams, offset: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + offset) % 2**63)


def _run_group(
    engine: Engine, label: str, group: Sequence[Prompt], params: list[SamplingParams], repeat: int, plan: Plan
) -> list[Sample]:
    """Make the timed call, and read the counters before and after it."""
    before = {name: read() for name, read in plan.counters.items()}
    started = time.perf_counter()
    try:
        if plan.chat:
            outputs = engine.chat([prompt.conversation for prompt in group], params)
        else:
            outputs = engine.generate([prompt.text for prompt in group], params)
    except Exception as error:  # a failure of one method must not lose the others' measurements
        message = f"{type(error).__name__}: {error}"
        return [Sample(label, prompt, repeat, 0.0, (), Metrics(), message) for prompt in group]
    share = 1 / len(group)
    seconds = (time.perf_counter() - started) / len(group)
    counts = {name: (read() - before[name]) / len(group) for name, read in plan.counters.items()}
    came = [output.metrics.emitted for output in outputs if output.metrics.emitted]
    read_after = max((steps[0].seconds for steps in came), default=None)
    ended = max((steps[-1].seconds for steps in came), default=0.0)
    samples = []
    for prompt, output in zip(group, outputs, strict=True):
        failed = output.error or (None if output.finish_reason in _DONE else f"finished as {output.finish_reason}")
        tokens = () if failed else tuple(output.token_ids)
        sample = Sample(label, prompt, repeat, seconds, tokens, output.metrics, failed, counts=counts)
        if read_after is not None and not failed:
            sample = replace(
                sample,
                first_token_seconds=read_after * share,
                decode_seconds=(ended - read_after) * share,
                decode_tokens=sum(step.tokens for step in output.metrics.emitted if step.seconds > read_after),
            )
        samples.append(sample)
    return samples
