"""The speed of points by the planner's cost model: counted steps, each at its cost, whatever else the machine does.

    times plain = tokens of a step * step(0) / step(nodes)        decoding alone; foretoken/planner/costs.py

A lossy rule writes another text than plain decoding, so that its steps cannot be replayed along the planner's record:
they are counted in its own answers. The record gives the costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from foretoken.core.errors import ForetokenError
from foretoken.core.metrics import Metrics
from foretoken.engine.llm import LLM
from foretoken.planner import costs as cost_model
from foretoken.planner.trace import record
from foretoken_lab.studies.tradeoff.points import DRAFT, PLAIN
from foretoken_lab.studies.tradeoff.run import Questions, Trial
from foretoken_lab.tasks.prompt_ids import question_ids

_ANSWERS = 6  # of the record
_LEAST_SECONDS = 1.0  # of timing forwards


def modelled(engines: Mapping[str, LLM], questions: Questions, trials: Sequence[Trial]) -> dict[str, float]:
    """How many times as fast as plain decoding each point is; points with drafts that cannot be timed are left out.

    Args:
        engines: a point's label -> its engine, plain decoding among them.
        questions: of one task, with the parameters of the trials.
        trials: of all points.
    """
    plain = engines[PLAIN]
    target, requests, began = plain.target, plain.max_num_seqs, time.perf_counter()
    asked = [question_ids(plain, example.prompt) for example in questions.examples[:_ANSWERS]]
    trace = record(target, list(enumerate(asked)), questions.params, math.inf)
    context = round(sum(len(each.prompt_ids) + len(each.tokens) / 2 for each in trace.answers) / len(trace.answers))
    seconds = max(_LEAST_SECONDS, time.perf_counter() - began)
    costs = cost_model.measure(target, trace, seconds=seconds, contexts=(context,), requests=(requests,))
    drafts: dict[int, cost_model.DraftCosts | None] = {}
    found = {PLAIN: 1.0}
    for label, engine in engines.items():
        if label in (PLAIN, DRAFT):
            continue
        recipe, metrics = engine.recipe, Metrics()
        for trial in trials:
            if trial.label == label:
                metrics.add(trial.metrics)
        key = id(recipe.drafter)
        if key not in drafts:
            try:
                verifier = None if recipe.takes_turns else recipe.verifier
                drafts[key] = cost_model.measure_draft(
                    target, recipe.drafter, verifier, trace, costs, math.inf, turns=2
                )
            except ForetokenError:
                drafts[key] = None
        draft = drafts[key]
        if draft is not None and metrics.num_steps:
            step = costs.step(metrics.num_draft_tokens / metrics.num_steps, context, draft, requests)
            alone = costs.step(0, context, cost_model.DraftCosts(), requests)
            found[label] = metrics.tokens_per_step * alone / step
    return found
