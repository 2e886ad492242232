"""``foretoken plan``: record once, replay every candidate, run the best ones for real, and choose."""

import hashlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from foretoken import catalog
from foretoken.bench import harness
from foretoken.core.errors import InputError
from foretoken.data.prompts import Prompt
from foretoken.engine.draft_length.record import machine_of
from foretoken.engine.llm import LLM
from foretoken.engine.plan_file import VERSION
from foretoken.models.fingerprint import fingerprint_of
from foretoken.options.sampling import SamplingParams
from foretoken.planner import costs as cost_model
from foretoken.planner.candidates import Candidate, candidates, is_tried
from foretoken.planner.predict import evaluate, interval_of
from foretoken.planner.replay import States
from foretoken.planner.trace import Trace, record

PLAIN = harness.BASELINE
_RECORDING, _COSTS, _REPLAYS = 0.5, 0.12, 0.2  # of the time; the rest is for real runs
_MEASURED = 3  # candidates that are run for real
_LEAST_GAIN = 1.02  # below, plain decoding is chosen
_WORTH_A_FORM = 0.7  # of the best prediction, so that trees and rounded forms of a drafter are tried
SAME = "as its plain form"

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan is made of.

    Attributes:
        prompts: of the user; the chat template is applied with ``chat``.
        params: of every prompt.
        minutes: about the time that it may take.
        drafts: draft models and folders of heads.
        methods: names to look at; None: the whole catalogue.
        contexts: at which forwards are timed.
        requests: numbers of requests that run together.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    chat: bool
    minutes: float = 5.0
    drafts: Sequence[str] = ()
    methods: Sequence[str] | None = None
    contexts: Sequence[int] = cost_model.CONTEXTS
    requests: Sequence[int] = (1,)


@dataclass(slots=True)
class Plan:
    """A finished plan.

    Attributes:
        target: name, fingerprint and dtype.
        machine: processor, variant of the native decoder, threads.
        workload: prompts and parameters.
        costs: of the target.
        candidates: the usable ones from the best down, then the others with their reasons.
        plain: tokens per second of plain decoding over whole answers, recorded and measured.
        seconds: that planning took.
        busy: whether other programs took processor time meanwhile.
    """

    target: dict[str, Any]
    machine: dict[str, Any]
    workload: dict[str, Any]
    costs: cost_model.Costs
    candidates: list[Candidate]
    plain: float
    seconds: float = 0.0
    busy: bool = False

    @property
    def chosen(self) -> Candidate | None:
        """The candidate with the best rate; None: plain decoding."""
        usable = [each for each in self.candidates if each.rate > 0.0]
        measured = [each for each in usable if each.measured is not None] or usable
        best = max(measured, key=lambda each: each.rate, default=None)
        return None if best is None or best.rate < _LEAST_GAIN else best

    @property
    def schedule(self) -> list[list[int]]:
        """[from, to, length] by the number of requests, 0 for no draft; each number holds up to the next one."""
        chosen = self.chosen
        lengths = {1: 0} if chosen is None else chosen.lengths_by_requests or {1: chosen.length}
        counts = sorted(lengths)
        return [
            [count, after - 1, lengths[count]]
            for count, after in zip(counts, [*counts[1:], max(counts[-1] + 1, 2)], strict=True)
        ]

    def record(self) -> dict[str, Any]:
        """The plan as JSON: the file that ``--plan`` takes."""
        forward = {
            str(count): {"rows": each.rows, "contexts": each.contexts, "seconds": each.seconds}
            for count, each in self.costs.forward.items()
        }
        return {
            "version": VERSION,
            "target": self.target,
            "machine": self.machine,
            "workload": self.workload,
            "costs": {**forward["1"], "overhead": self.costs.overhead, "by_requests": forward},
            "plain_tokens_per_second": self.plain,
            "candidates": [_as_json(each) for each in self.candidates],
            "chosen": {"method": PLAIN} if self.chosen is None else self.chosen.settings,
            "schedule": self.schedule,
            "seconds": self.seconds,
        }


def _as_json(candidate: Candidate) -> dict[str, Any]:
    found = {**asdict(candidate), "speculative_config": candidate.settings}
    found["interval"] = [candidate.predicted - candidate.error, candidate.predicted + candidate.error]
    for name in ("config", "plain_form", "seconds", "error"):
        del found[name]
    return found


def make(llm: LLM, wanted: Wanted, progress: Progress = lambda state, share: None) -> tuple[Plan, Trace]:
    """Make a plan for a loaded model.

    Args:
        llm: plain decoding over the target.
        progress: called with the present work and the share of the time that has passed.
    Raises:
        InputError: a prompt cannot be used.
        ConfigError: an unknown method.
    """
    began, total = perf_counter(), 60.0 * wanted.minutes

    def show(state: str) -> None:
        progress(state, min(1.0, (perf_counter() - began) / total))

    target = llm.target
    listed = candidates(target, wanted.drafts, wanted.methods, greedy=wanted.params.greedy)
    prompts = _spread(wanted.prompts)
    ids, moments = [], [perf_counter()]
    for place, prompt in enumerate(prompts):
        ids.append((place, _ids(llm, prompt, chat=wanted.chat)))
        moments.append(perf_counter())
    intake = statistics.median([later - sooner for sooner, later in pairwise(moments)] or [0.0])
    show("recording plain answers")
    trace = record(
        target,
        ids,
        wanted.params,
        _RECORDING * total,
        lambda done, tokens: show(f"recorded {done} of {len(ids)} answers, {tokens:,} tokens"),
        intake=intake,
    )
    now = perf_counter()
    left = max(began + total - now, 0.5 * total)  # a recording that ended early leaves its time to the real runs
    costs = cost_model.measure(
        target,
        trace,
        seconds=_COSTS * total,
        contexts=wanted.contexts,
        requests=wanted.requests,
        progress=lambda state: show(f"timing forwards: {state}"),
    )
    usable = [each for each in listed if not each.reason]
    until = now + left * (_COSTS + _REPLAYS) / (1.0 - _RECORDING)
    _replay(usable, target, trace, costs, until, show)
    replayed = sorted((each for each in usable if each.predicted), key=lambda each: -each.predicted)
    plain = trace.num_tokens / sum(costs.plain(each) for each in trace.answers)
    plan = Plan(_target(llm), machine_of(target), _workload(prompts, trace), costs, listed, plain)
    best = _different(replayed)[:_MEASURED]
    end = now + left
    two = sum(costs.plain(each) for each in trace.answers[:2])
    time_enough = end - perf_counter() > two * (len(best) + 1 + 2 * sum(not each.replayed for each in usable))
    unknown = [each for each in usable if not each.replayed and (time_enough or _is_default(each))]
    _measure(llm, plan, trace, prompts, [*best, *unknown], wanted, end, show)
    rest = [each for each in listed if each not in replayed and each.measured is None]
    ranked = sorted((each for each in listed if each not in rest), key=lambda each: (each.measured is None, -each.rate))
    plan.candidates = [*ranked, *rest]
    plan.seconds, plan.busy = perf_counter() - began, _is_busy(target)
    return plan, trace


def _replay(
    usable: Sequence[Candidate],
    target: Any,
    trace: Trace,
    costs: cost_model.Costs,
    until: float,
    show: Callable[[str], None],
) -> None:
    """Predict the speed of each candidate; the time until then is shared by those that are left."""
    states = States(target)
    for place, each in enumerate(usable):
        now, plain_form = perf_counter(), each.plain_form
        if plain_form is not None and plain_form.reason:
            each.reason = SAME
        elif plain_form is not None and _hopeless(plain_form, usable):
            each.reason = "its plain form gains too little"
        elif now > until and not is_tried(catalog.find(each.config["method"], "drafter")):
            each.reason = "not tried, the time was over (--minutes)"
        else:
            show(f"replaying {each.label}")
            evaluate(each, target, trace, states, costs, now + max(0.0, until - now) / (len(usable) - place))


def _is_default(candidate: Candidate) -> bool:
    """Whether this is the method without any choice: another one has to be faster."""
    return bool(catalog.find(candidate.config["method"], "drafter").load().declared.finds_model)


def _different(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best form of each method first, then the others: three forms of one method would be less informative."""
    first = {each.config["method"]: each for each in reversed(ranked)}
    heads = [each for each in ranked if first[each.config["method"]] is each]
    return [*heads, *(each for each in ranked if each not in heads)]


def _measure(
    llm: LLM,
    plan: Plan,
    trace: Trace,
    prompts: Sequence[Prompt],
    runs: Sequence[Candidate],
    wanted: Wanted,
    end: float,
    show: Callable[[str], None],
) -> None:
    """Run plain decoding and candidates on as many of the prompts as the time allows, interleaved."""
    if not runs:
        return
    engines: dict[str, Any] = {PLAIN: llm}
    for each in runs:
        engines[each.label] = llm.with_method(each.settings)
    plain = [plan.costs.plain(each) for each in trace.answers]
    shares = sum(1.0 / max(each.predicted, 0.5) for each in runs) + 1.0
    count = 1
    while count < len(plain) and sum(plain[: count + 1]) * shares < max(0.0, end - perf_counter()):
        count += 1
    params = wanted.params
    chosen = harness.Plan(list(prompts[:count]), params, repeats=1, chat=wanted.chat)
    show(f"running {', '.join(engines)}")
    records = harness.measure(engines, chosen, progress=lambda label: show(f"running {label}"))
    tokens = sum(len(each.tokens) for each in records.samples if each.label == PLAIN)
    base = sum(each.seconds for each in records.samples if each.label == PLAIN)
    if base:
        plan.plain = tokens / base
    for each in runs:
        its = [sample for sample in records.samples if sample.label == each.label]
        failed = next((sample.error for sample in its if sample.error), None)
        if failed or not base:
            each.reason = failed or "no answers"
            continue
        each.reason = ""
        each.measured_tokens_per_second = sum(len(one.tokens) for one in its) / sum(one.seconds for one in its)
        each.measured = each.measured_tokens_per_second / plan.plain
        base_seconds = [one.seconds for one in records.samples if one.label == PLAIN]
        half = interval_of(base_seconds, [one.seconds for one in its])
        each.spread = each.measured - half, each.measured + half
        if not each.replayed:
            counts = [one.metrics for one in its]
            each.tokens_per_step = sum(one.num_tokens for one in counts) / max(1, sum(one.num_steps for one in counts))
            continue
        same = min(count, len(each.seconds))
        each.predicted_of_run = sum(plain[:same]) / sum(each.seconds[:same])
        each.differs = abs(each.measured - each.predicted_of_run) > each.error + half
    for label, engine in engines.items():
        if label != PLAIN:
            engine.close()


def _hopeless(plain_form: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a drafter is so far below the best one that no other form of it will reach that."""
    return 0.0 < plain_form.predicted < _WORTH_A_FORM * max(each.predicted for each in others)


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with their categories in turn: a recording that ends early has some of each."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    most = max(map(len, groups.values()), default=0)
    return [group[place] for place in range(most) for group in groups.values() if place < len(group)]


def _ids(llm: LLM, prompt: Prompt, *, chat: bool) -> list[int]:
    """Token ids as a benchmark of this prompt has them.

    Raises:
        InputError: it does not fit into the context.
    """
    if prompt.messages and not chat:
        raise InputError(f"{prompt.place} is a conversation, which needs a chat template: write a 'prompt'")
    if chat:
        found = llm.chat_prompt(prompt.conversation)["prompt_token_ids"]
    else:
        found = list(llm.tokenizer(prompt.text)["input_ids"])
    if len(found) >= llm.target.max_length:
        raise InputError(
            f"{prompt.place} has {len(found)} tokens; the context is {llm.target.max_length}, including the output: "
            "shorten it"
        )
    return found


def _is_busy(target: Any) -> bool:
    """Whether more threads wanted the processor in the last minute than it has cores."""
    if target.device.type != "cpu" or not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] > (os.cpu_count() or 1) + 0.5


def _target(llm: LLM) -> dict[str, Any]:
    target = llm.target
    return {"name": target.name, "fingerprint": fingerprint_of(target.source), "dtype": target.precision}


def _workload(prompts: Sequence[Prompt], trace: Trace) -> dict[str, Any]:
    digest = hashlib.sha256("\0".join(each.text for each in prompts).encode()).hexdigest()
    params: Mapping[str, Any] = {
        "temperature": trace.params.temperature,
        "max_tokens": trace.params.max_tokens,
        "seed": trace.params.seed,
    }
    lengths = [len(each.prompt_ids) for each in trace.answers]
    return {
        "sha256": digest,
        "prompts": len(trace.answers),
        "given": len(prompts),
        "tokens": trace.num_tokens,
        "prompt_tokens": statistics.median(lengths),
        "params": params,
    }
