"""The cost of a step on this machine: the target's forward by rows and context, the drafter, and the engine's rest.

    step = V(rows, context) + D(nodes) + o

V is the lower quartile of interleaved forwards, scaled to the recorded steps: another program interrupts a long forward
more often than a short one, so that medians of few and of many rows are not comparable on a busy machine. One thread's
processor time has no such interruptions: it is measured where there is one thread. D is timed in
real steps, relative to the target's forward of the same step: alone, a draft model finds its weights in the processor's
cache. o is a plain step without its forward.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, thread_time
from typing import Any

import torch

from foretoken.core.errors import RequestError
from foretoken.core.protocols import Drafter, Verifier
from foretoken.engine.executors.serial import SerialExecutor
from foretoken.engine.executors.timeline import Timeline
from foretoken.engine.llm import LLM
from foretoken.engine.recipe import MAX_NODES
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import prefill
from foretoken.planner.expected import Expected
from foretoken.planner.trace import Answer, Trace

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXTS = (128, 2048, 8192)
DRAFT_LENGTHS = (1, 4, 8)
REPEATS = 20
_LEAST_REPEATS = 3
_STEPS = 20  # of a drafter at each length
_MOST_ROWS = 512  # of one forward


def interpolate(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Piecewise linear; the first value below the first place, and the last piece goes on beyond the last one."""
    if len(places) == 1 or place <= places[0]:
        return values[0]
    upper = min(bisect.bisect_left(places, place), len(places) - 1)
    share = (place - places[upper - 1]) / (places[upper] - places[upper - 1])
    return values[upper - 1] + share * (values[upper] - values[upper - 1])


@dataclass(slots=True)
class ForwardCosts:
    """Seconds of one forward.

    Attributes:
        rows: of each request.
        contexts: tokens before the rows.
        seconds: by context and rows.
        spread: half of the distance between quartiles, relative to the median; the median over rows.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: list[list[float]]
    spread: float = 0.0

    def __call__(self, rows: float, context: float) -> float:
        """Seconds of a forward with so many rows a request."""
        found = [interpolate(self.rows, each, rows) for each in self.seconds]
        return max(interpolate(self.contexts, found, context), found[0] / 2)


@dataclass(slots=True)
class DraftCosts:
    """Seconds that a drafter adds to a step, by its draft tokens, and to a prompt, by its tokens."""

    nodes: tuple[int, ...] = (0,)
    seconds: tuple[float, ...] = (0.0,)
    prompt_token: float = 0.0

    def __call__(self, nodes: float) -> float:
        return max(0.0, interpolate(self.nodes, self.seconds, nodes))


@dataclass(slots=True)
class Costs:
    """The target's costs on this machine.

    Attributes:
        forward: by the number of requests that run together, 1 among them.
        overhead: seconds of a plain step without its forward.
    """

    forward: dict[int, ForwardCosts] = field(default_factory=dict)
    overhead: float = 0.0

    def step(self, nodes: float, context: float, draft: DraftCosts, requests: int = 1) -> float:
        """Seconds of a step with so many draft tokens for each of the requests."""
        overhead = self.overhead * requests
        return self.forward[requests](1 + nodes, context) + draft(nodes) + overhead

    def decoding(self, found: Expected, draft: DraftCosts, context: int | None = None, requests: int = 1) -> float:
        """Seconds of expected steps.

        Args:
            context: in place of each step's own.
        """
        steps = found.steps
        return math.fsum(
            weight * self.step(nodes, own if context is None else context, draft, requests)
            for weight, own, nodes in steps
        )

    def plain(self, answer: Answer) -> float:
        """Seconds of a whole answer by plain decoding."""
        first, rest = len(answer.prompt_ids), len(answer.tokens) - 1
        return answer.prompt_seconds + rest * self.step(0, first + rest / 2, DraftCosts())

    def answer(self, answer: Answer, found: Expected, draft: DraftCosts) -> float:
        """Seconds of a whole answer with a drafter."""
        reading = draft.prompt_token * len(answer.prompt_ids)
        return answer.prompt_seconds + reading + self.decoding(found, draft)

    @property
    def ceiling(self) -> float:
        """The gain of a drafter that costs nothing and is always right."""
        context = self.forward[1].contexts[0]
        plain = self.forward[1](1, context)
        return max((1 + nodes) * plain / self.forward[1](1 + nodes, context) for nodes in range(1, MAX_NODES + 1))

    def break_even(self, nodes: float, context: float, draft: DraftCosts) -> float:
        """Tokens that a step with so many draft tokens must bring in order to be as fast as plain decoding."""
        return self.step(nodes, context, draft) / self.step(0, context, DraftCosts())


def measure(
    target: LanguageModel,
    trace: Trace,
    *,
    seconds: float,
    contexts: Sequence[int] = CONTEXTS,
    requests: Sequence[int] = (1,),
    progress: Callable[[str], None] = lambda state: None,
) -> Costs:
    """Time forwards of the target over recorded text, in about so many seconds.

    Contexts that do not fit, or would take too long to read, are left out; the first is always there.
    """
    began = perf_counter()
    text = [token for answer in trace.answers for token in answer.text]
    fits = [each for each in sorted(set(contexts)) if each + max(ROWS) < target.max_length]
    fits = fits or [max(1, target.max_length - max(ROWS) - 1)]
    costs = Costs()
    for count in dict.fromkeys((1, *requests)):
        found = ForwardCosts(tuple(each for each in ROWS if each * count <= _MOST_ROWS), (), [])
        cache = target.new_cache(count)
        slots = [cache.acquire()]
        read, read_seconds = 0, 0.0  # tokens, and seconds of one
        for context in fits if count == 1 else fits[:1]:
            left = seconds - (perf_counter() - began)
            if read and (context - read) * read_seconds > left / 2:
                break
            progress(f"{count} request{'s' * (count > 1)} at a context of {context:,}")
            start = perf_counter()
            prefill(target, cache, slots[0], [text[place % len(text)] for place in range(read, context)])
            read_seconds, read = (perf_counter() - start) / (context - read), context
            slots += [cache.fork(slots[0]) for _ in range(count - 1)]
            seconds_by_rows, spread = _time_rows(
                target, cache, slots, found.rows, text, left / (len(fits) + len(requests))
            )
            found.contexts = (*found.contexts, context)
            found.seconds.append(seconds_by_rows)
            found.spread = max(found.spread, spread)
        costs.forward[count] = found
    _scale(costs, trace)
    return costs


def _scale(costs: Costs, trace: Trace) -> None:
    """Take the overhead from the recorded steps, and scale the forwards so that plain steps cost the same as there.

    Other programs on the machine slow one minute more than the next; only the ratios of neighbouring forwards last.
    """
    recorded = [each for each in trace.answers if len(each.tokens) > 1]
    if not recorded:
        return
    costs.overhead = statistics.median(each.rest_seconds for each in recorded)
    contexts = [len(each.prompt_ids) + len(each.tokens) / 2 for each in recorded]
    factors = [
        (each.step_seconds - each.rest_seconds) / costs.forward[1](1, context)
        for each, context in zip(recorded, contexts, strict=True)
    ]
    factor = statistics.median(factors)
    for found in costs.forward.values():
        found.seconds = [[each * factor for each in row] for row in found.seconds]


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall: neighbours in the wrong order get their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (second, count), (first, others) = pools.pop(), pools.pop()
            pools.append(((first * others + second * count) / (others + count), others + count))
    return [value for value, count in pools for _ in range(count)]


def _time_rows(
    target: LanguageModel, cache: Any, slots: Sequence[int], rows: Sequence[int], text: Sequence[int], seconds: float
) -> tuple[list[float], float]:
    """Lower quartiles of interleaved forwards by rows, and their spread."""
    began, times = perf_counter(), defaultdict[int, list[float]](list)
    clock = thread_time if target.device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    for repeat in range(-1, REPEATS):
        if repeat >= _LEAST_REPEATS and perf_counter() - began > seconds:
            break
        for count in rows:
            batch = PackedBatch()
            for slot in slots:
                cache.reserve(slot, count)
                tokens = [text[(repeat + place) % len(text)] for place in range(count)]
                batch.add_chunk(slot, cache.lengths[slot], tokens, wanted=count, verification=True)
            start = clock()
            target.forward(batch, DensePlan(cache, batch))
            if repeat >= 0:  # the first is a warm-up
                times[count].append(clock() - start)
    quartiles = [statistics.quantiles(times[count], n=4) for count in rows]
    spreads = [(upper - lower) / 2 / middle for lower, middle, upper in quartiles]
    return rising([each[0] for each in quartiles]), statistics.median(spreads)


def measure_draft(
    target: LanguageModel, drafter: Drafter, verifier: Verifier | str | None, trace: Trace, costs: Costs, until: float
) -> DraftCosts:
    """Time a drafter in real steps, at several lengths.

    Args:
        verifier: of its recipe.
        until: by ``time.perf_counter``; the first length is measured in any case.
    Raises:
        RequestError: the drafter failed.
    """
    answer = max(trace.answers, key=lambda each: len(each.tokens))
    times, readings = defaultdict[int, list[float]](list), list[float]()
    for length in DRAFT_LENGTHS:
        if times and perf_counter() > until:
            break
        readings.append(_time_steps(target, drafter, verifier, trace, answer, costs, length, times))
    if not times:
        return DraftCosts()
    nodes = sorted(times)
    medians = {each: statistics.median(times[each]) for each in nodes}
    kept = [each for each in nodes if len(times[each]) >= min(3, len(times[nodes[-1]]))] or nodes
    typical = statistics.median(medians.values())
    # each length has read the prompt once
    each_token = max(0.0, statistics.median(readings) - typical) / len(answer.prompt_ids)
    if kept[0] > 0 and len(kept) > 1:  # an empty draft costs what the line through the first two gives, or nothing
        first, second = kept[:2]
        slope = (medians[second] - medians[first]) / (second - first)
        medians[0] = max(0.0, medians[first] - slope * first)
        kept = [0, *kept]
    return DraftCosts(tuple(kept), tuple(max(0.0, medians[each]) for each in kept), each_token)


def _time_steps(
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier | str | None,
    trace: Trace,
    answer: Answer,
    costs: Costs,
    length: int,
    times: Mapping[int, list[float]],
) -> float:
    """Add the seconds of each step without forward and overhead, by draft tokens; returns those of the first draft."""
    config = {"method": drafter, "verifier": verifier, "num_speculative_tokens": length}
    llm = LLM.from_target(target, speculative_config=config, max_num_seqs=1, enable_prefix_caching=False)
    executor = llm.engine.executor
    assert isinstance(executor, SerialExecutor)
    executor.timeline = timeline = Timeline()
    params = replace(trace.params_of(answer), max_tokens=min(answer.limit, 8 * _STEPS), ignore_eos=True)
    (request,) = llm.new_requests({"prompt_token_ids": list(answer.prompt_ids)}, params)
    llm.engine.add(request)
    first, steps = 0.0, 0
    while not request.finished and steps < _STEPS:
        timeline.intervals.clear()
        before, answered = request.metrics.num_draft_tokens, request.num_output
        start = perf_counter()
        llm.engine.step()
        total = perf_counter() - start
        if not answered or request.finished:
            continue
        forward = next((each.end - each.begin for each in timeline.intervals if each.actor == "target"), 0.0)
        nodes, context = request.metrics.num_draft_tokens - before, len(request.tokens)
        # relative to the neighbouring forward, which other programs slow as much
        spent = (total - forward) / forward * costs.forward[1](1 + nodes, context) - costs.overhead
        if steps:
            times[nodes].append(spent)
        else:
            first = spent
        steps += 1
    llm.engine.cancel(request)
    if request.finish_reason == "error":
        raise RequestError(request.error or "the drafter failed")
    return first
