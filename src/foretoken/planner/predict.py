"""Evaluate one candidate along a trace: replay it at every length, and predict its speed by the cost model."""

import math
import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.engine import compose
from foretoken.engine.recipe import MAX_NODES, Recipe
from foretoken.planner.candidates import Candidate, clause
from foretoken.planner.costs import REPEATS, Costs, DraftCosts, measure_draft
from foretoken.planner.expected import Expected, Start, chained, expect
from foretoken.planner.replay import CannotReplay, Replay, States
from foretoken.planner.trace import Answer, Trace

LENGTHS = (1, 2, 4, 8, 16)  # of drafts that have to be replayed for each length
MODEL_ERROR = 0.05  # of the cost model, relative, before anything was measured
_RESAMPLES = 200
_QUANTILE = 0.95
_FEW = 0.25  # relative error of the gain on one or two prompts
_LEAST_ANSWERS = 3  # that are replayed, however late it is

Made = dict[int, list[Expected]]  # by length, one for each answer


def evaluate(candidate: Candidate, target: Any, trace: Trace, states: States, costs: Costs, until: float) -> DraftCosts:
    """Replay a candidate and fill in its prediction; sets its reason if it cannot draft here.

    Args:
        until: by ``time.perf_counter``; answers that are not replayed by then are left out, but the first.
    Returns:
        the costs of its drafts.
    """

    draft = DraftCosts()
    try:
        recipe = compose.build(candidate.config, target)
    except ForetokenError as error:
        candidate.reason = clause(error)
        return draft
    try:
        Replay(recipe, target, trace, states)  # refuses what cannot be replayed before anything is timed
        draft = measure_draft(target, recipe.drafter, recipe.verifier, trace, costs, until)
        made = _replay(recipe, lambda: compose.build(candidate.config, target), target, trace, states, until)
        _predict(candidate, made, trace, costs, draft)
    except CannotReplay as error:
        candidate.replayed, candidate.reason = False, f"{error}, so that it has to be run: no time was left"
    except ForetokenError as error:
        candidate.reason = clause(error)
    finally:
        recipe.drafter.close()
    return draft


def _replay(
    recipe: Recipe, fresh: Callable[[], Recipe], target: Any, trace: Trace, states: States, until: float
) -> Made:
    """The expected steps by length; drafters without a model are made anew for each length, since they may learn."""
    run = Replay(recipe, target, trace, states)
    if not recipe.drafter.branches:
        starts = _starts(run, recipe, trace, until)
        if starts is not None:
            return {
                length: [
                    expect(found, answer.log_p, length, run.rule, len(answer.prompt_ids))
                    for answer, found in zip(trace.answers, starts, strict=False)
                ]
                for length in range(1, MAX_NODES + 1)
            }
    again = recipe.drafter.flops == 0.0
    runs = {length: Replay(fresh(), target, trace, states) if again else run for length in LENGTHS}
    made: Made = {length: [] for length in LENGTHS}
    for answer in trace.answers:
        for length, each in runs.items():
            if each.deterministic:
                made[length].append(each.run_fixed(answer, length).expected)
            else:
                found = each.draft_everywhere(answer, length)
                made[length].append(expect(found, answer.log_p, length, each.rule, len(answer.prompt_ids)))
        if perf_counter() > until and len(made[LENGTHS[0]]) >= _LEAST_ANSWERS:
            break
    return made


def _starts(run: Replay, recipe: Recipe, trace: Trace, until: float) -> list[list[Start]] | None:
    """The draft at every place of each answer; None: a shorter draft is not the beginning of a longer one.

    Where drafts of one token give the whole chain (checked on the first answer), the others are read once only.
    """
    first = trace.answers[0]
    whole = run.draft_everywhere(first)
    if not _same(whole, run.draft_everywhere(first, 2), first, run.rule, 2):
        return None
    most = max((each.nodes for each in whole), default=0)
    reads = recipe.drafter.offers.ahead and recipe.drafter.flops != 0.0
    if reads:
        ones = chained(run.draft_everywhere(first, 1), most, first.limit)
        reads = all(_same(whole, ones, first, run.rule, length) for length in LENGTHS)
    found = [whole]
    for answer in trace.answers[1:]:
        if perf_counter() > until and len(found) >= _LEAST_ANSWERS:
            break
        starts = run.draft_everywhere(answer, 1 if reads else MAX_NODES)
        found.append(chained(starts, most, answer.limit) if reads else starts)
    return found


def _same(one: Sequence[Start], other: Sequence[Start], answer: Answer, rule: str, length: int) -> bool:
    """Whether drafts of this length take the same steps."""
    a, b = (expect(each, answer.log_p, length, rule, len(answer.prompt_ids)) for each in (one, other))
    if [step[1:] for step in a.steps] != [step[1:] for step in b.steps]:
        return False
    return all(abs(x[0] - y[0]) < 1e-2 for x, y in zip(a.steps, b.steps, strict=True))


def _predict(candidate: Candidate, made: Made, trace: Trace, costs: Costs, draft: DraftCosts) -> None:
    """Choose the length with the best predicted speed, and fill in what the report says of it."""
    count = min(map(len, made.values()))
    answers = trace.answers[:count]
    plain = [costs.plain(each) for each in answers]
    seconds = {
        length: [costs.answer(answer, each, draft) for answer, each in zip(answers, found, strict=False)]
        for length, found in made.items()
    }
    candidate.by_length = {length: sum(plain) / sum(its) for length, its in seconds.items()}
    length = max(candidate.by_length, key=candidate.by_length.__getitem__)
    best, candidate.seconds = made[length][:count], seconds[length][:count]
    candidate.length, candidate.predicted = length, candidate.by_length[length]
    model = max(MODEL_ERROR, costs.forward[1].spread / math.sqrt(REPEATS)) * candidate.predicted
    candidate.error = math.hypot(interval_of(plain, candidate.seconds), model)
    steps = [step for each in best for step in each.steps]
    weight = math.fsum(each[0] for each in steps)
    tokens = sum(each.tokens for each in best)
    if weight:
        nodes = math.fsum(each[0] * each[2] for each in steps) / weight
        context = math.fsum(each[0] * each[1] for each in steps) / weight
        candidate.tokens_per_step = tokens / weight
        candidate.needed = costs.break_even(nodes, context, draft)
        candidate.draft_share = draft(nodes) / costs.step(nodes, context, draft)
    for context in costs.forward[1].contexts:
        its = math.fsum(costs.decoding(each, draft, context) for each in best)
        candidate.by_context[context] = tokens * costs.step(0, context, DraftCosts()) / its if its else 0.0
    for requests in costs.forward:
        _predict_batch(candidate, made, count, costs, draft, requests)


def _predict_batch(
    candidate: Candidate, made: Made, count: int, costs: Costs, draft: DraftCosts, requests: int
) -> None:
    """The best length with so many requests in lock-step."""
    context = costs.forward[requests].contexts[0]
    plain = costs.step(0, context, DraftCosts(), requests)
    gains = {}
    for length, found in made.items():
        tokens = sum(each.tokens for each in found[:count])
        its = math.fsum(costs.decoding(each, draft, context, requests) for each in found[:count])
        gains[length] = tokens * plain / its if its else 0.0
    best = max(gains, key=gains.__getitem__)
    candidate.by_requests[requests] = gains[best]
    candidate.lengths_by_requests[requests] = best if gains[best] > 1.0 else 0


def interval_of(plain: Sequence[float], seconds: Sequence[float]) -> float:
    """Half of the interval of 90 % of a gain, resampled over prompts."""
    gain = sum(plain) / sum(seconds)
    rng, gains = random.Random(0), []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(range(len(plain)), k=len(plain))
        gains.append(sum(plain[each] for each in drawn) / sum(seconds[each] for each in drawn))
    gains.sort()
    low, high = gains[int((1.0 - _QUANTILE) * _RESAMPLES)], gains[int(_QUANTILE * _RESAMPLES) - 1]
    return (high - low) / 2 if len(plain) > 2 else _FEW * gain
