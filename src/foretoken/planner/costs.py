"""The cost of a step on this machine: the target's forward by rows and context, the drafter, and the engine's rest.

    step = V(rows, context) + D(nodes, requests) + o

V is the lower quartile of interleaved forwards, scaled to the recorded steps: another program interrupts a long forward
more often than a short one, so that medians of few and of many rows are not comparable on a busy machine. One thread's
processor time has no such interruptions: it is measured where there is one thread. o is a plain step without its
forward.

D is all that a draft adds to a step: real steps with drafts are timed in turn with plain steps of another engine, so
that both see the same machine, and D is their ratio times a plain step, less V and o. Timed alone, a draft model would
find its weights in the processor's cache, and the target's forward after it does not find its own there. Steps of one
length are averaged, since their number of draft tokens does not determine their cost: a drafter that copies first asks
its model only where it finds no copy.
"""

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
from foretoken.engine.llm import LLM
from foretoken.engine.recipe import MAX_NODES
from foretoken.engine.request import Request
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
TURNS = 4  # answers on which a drafter is timed
STEPS = 5  # of a turn at each length, after one that is not counted: it follows another kind of step
_LATE = 3.0  # times the median: no step counts as more, since another program has interrupted it
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
    """Seconds that a drafter adds to a step, by the mean number of draft tokens, and to a prompt, by its tokens.

    Attributes:
        nodes, seconds: of one request.
        together: the same of several requests that run at once; without it, each costs as much as one alone.
    """

    nodes: tuple[float, ...] = (0,)
    seconds: tuple[float, ...] = (0.0,)
    prompt_token: float = 0.0
    together: "dict[int, DraftCosts]" = field(default_factory=dict)

    def __call__(self, nodes: float, requests: int = 1) -> float:
        known = self.together.get(requests)
        return requests * max(0.0, interpolate(self.nodes, self.seconds, nodes)) if known is None else known(nodes)


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
        return self.forward[requests](1 + nodes, context) + draft(nodes, requests) + overhead

    def decoding(self, found: Expected, draft: DraftCosts, context: int | None = None, requests: int = 1) -> float:
        """Seconds of expected steps.

        Args:
            context: in place of each step's own.
        """
        plain = DraftCosts()
        forwards = math.fsum(
            weight * self.step(nodes, own if context is None else context, plain, requests)
            for weight, own, nodes in found.steps
        )
        return forwards + found.num_steps * draft(found.mean_nodes, requests)

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
    target: LanguageModel,
    drafter: Drafter,
    verifier: Verifier | str | None,
    trace: Trace,
    costs: Costs,
    until: float,
    lengths: Sequence[int] = DRAFT_LENGTHS,
    turns: int = TURNS,
) -> DraftCosts:
    """Time a drafter in real steps at several lengths, in turn with plain steps, for each number of requests.

    Args:
        verifier: of its recipe.
        until: by ``time.perf_counter``; one answer is measured in any case.
        lengths: draft tokens at most.
        turns: answers that are tried at most, each with all lengths.
    Raises:
        RequestError: the drafter failed.
    """
    most, longest = max(costs.forward), max(lengths)
    plain, drafting = (
        LLM.from_target(
            target,
            speculative_config=config,
            max_num_seqs=most,
            max_rows_per_step=max(_MOST_ROWS, most * (1 + longest)),
            enable_prefix_caching=False,
        )
        for config in (None, {"method": drafter, "verifier": verifier, "num_speculative_tokens": longest})
    )
    answers = sorted(trace.answers, key=lambda each: -len(each.tokens))
    found: dict[int, DraftCosts] = {}
    for requests in sorted(costs.forward):
        if found and perf_counter() > until:
            break
        steps, readings = defaultdict[int, list[_Step]](list), list[float]()
        for turn in range(turns):
            if turn and perf_counter() > until:
                break
            chosen = [answers[(turn + place) % len(answers)] for place in range(requests)]
            readings.append(_time_turn(plain, drafting, trace, chosen, costs, lengths, steps))
        found[requests] = _draft_costs(steps, readings)
    alone = found.pop(1)
    alone.together = found
    return alone


_Step = tuple[float, float]  # draft tokens of a request, and seconds that they added


def _time_turn(
    plain: LLM,
    drafting: LLM,
    trace: Trace,
    answers: Sequence[Answer],
    costs: Costs,
    lengths: Sequence[int],
    steps: Mapping[int, list[_Step]],
) -> float:
    """Add the steps of some answers together, by length; returns the seconds of reading a token of a prompt."""
    begun = [_with_prompts_read(llm, trace, answers) for llm in (plain, drafting)]
    single = plain.target.device.type == "cpu" and torch.get_num_threads() == 1
    clock = thread_time if single else perf_counter
    count, first = len(answers), 0.0
    times = defaultdict[int, list[_Step]](list)
    for length in (0, *lengths):
        llm, requests = (drafting, begun[1]) if length else (plain, begun[0])
        for request in begun[1]:
            request.max_draft = length
        for step in range(1 + STEPS):
            if any(each.finished for each in requests):
                break
            before, start = sum(each.metrics.num_draft_tokens for each in requests), clock()
            llm.engine.step()
            seconds = clock() - start
            nodes = sum(each.metrics.num_draft_tokens for each in requests) - before
            if step:
                times[length].append((nodes / count, seconds))
            elif length == lengths[0]:
                first = seconds
    context = statistics.mean(len(each.tokens) for requests in begun for each in requests)
    for llm, requests in zip((plain, drafting), begun, strict=True):
        for request in requests:
            llm.engine.cancel(request)
            if request.finish_reason == "error":
                raise RequestError(request.error or "the drafter failed")
    if not (times[0] and times[lengths[0]]):
        return 0.0
    step_now, nothing = _mean([seconds for _, seconds in times[0]]), DraftCosts()
    scale = costs.step(0, context, nothing, count) / step_now
    for length in lengths:
        steps[length] += [
            (nodes, seconds * scale - costs.step(nodes, context, nothing, count)) for nodes, seconds in times[length]
        ]
    usual = _mean([seconds for _, seconds in times[lengths[0]]])
    return max(0.0, first - usual) * scale / sum(len(each.prompt_ids) for each in answers)


def _with_prompts_read(llm: LLM, trace: Trace, answers: Sequence[Answer]) -> list[Request]:
    """Requests that have read their prompts; nothing is drafted before all of them have."""
    requests = []
    for answer in answers:
        tokens_left = llm.target.max_length - len(answer.prompt_ids)
        params = replace(trace.params_of(answer), max_tokens=min(_MOST_ROWS, tokens_left), ignore_eos=True)
        requests += llm.new_requests({"prompt_token_ids": list(answer.prompt_ids)}, params, max_draft=0)
    for request in requests:
        llm.engine.add(request)
    while not all(each.num_output or each.finished for each in requests):
        llm.engine.step()
    return requests


def _draft_costs(steps: Mapping[int, list[_Step]], readings: Sequence[float]) -> DraftCosts:
    """The mean of the steps of each length, at their mean number of draft tokens."""
    places: dict[float, float] = {}
    for each in steps.values():
        if each:
            places[round(statistics.mean(nodes for nodes, _ in each), 1)] = _mean([seconds for _, seconds in each])
    known = sorted(places) or [0.0]
    return DraftCosts(
        tuple(known), tuple(max(0.0, places.get(each, 0.0)) for each in known), statistics.median(readings)
    )


def _mean(values: Sequence[float]) -> float:
    """The mean, in which an interrupted step counts as a late one."""
    return statistics.mean(min(each, _LATE * statistics.median(values)) for each in values)
