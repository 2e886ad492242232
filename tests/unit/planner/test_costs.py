"""The cost model on a target with forwards of a known time: the clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.engine import compose
from foretoken.options.sampling import SamplingParams
from foretoken.planner import costs as cost_model
from foretoken.planner.costs import DraftCosts, ForwardCosts, interpolate, rising
from foretoken.planner.expected import expect
from foretoken.planner.replay import Replay, States
from foretoken.planner.trace import record, run_alone
from foretoken_lab.testing import Scripted
from helpers import zoo_llms

_CLOCKS = (
    "foretoken.planner.costs",
    "foretoken.planner.trace",
    "foretoken.engine.step",
    "foretoken.engine.scheduler",
    "foretoken.engine.executors.executor",
    "foretoken.engine.executors.serial",
)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in _CLOCKS:
            monkeypatch.setattr(f"{module}.perf_counter", lambda: self.now)
        monkeypatch.setattr("foretoken.planner.costs.thread_time", lambda: self.now)


@pytest.mark.parametrize(("cold", "model"), [(0.0, 0.0), (0.0005, 0.0), (0.0, 0.001)])
def test_a_prediction_is_within_two_percent_of_the_run(
    cold: float, model: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards take 2 ms and 0.3 ms for each row, 0.2 ms more from the ninth on; a draft token takes 0.4 ms.

    Args:
        cold: seconds that a forward takes longer after drafting, since it does not find its weights in a cache.
        model: seconds that two of five drafts take longer, whatever their length, since they found no copy.
    """
    clock, target = Clock(monkeypatch), zoo_llms.target()
    compute, drafted = target.forward, [0]

    def forward(batch: Any, plan: Any, **options: Any) -> Any:
        clock.now += 0.002 + 0.0003 * len(batch) + 0.0002 * max(0, len(batch) - 8) + cold * (drafted[-1] > 0)
        drafted[-1] = 0
        return compute(batch, plan, **options)

    class Slow(Scripted):
        def draft(self, context: Any, budget: Any) -> Any:
            found = super().draft(context, budget)
            clock.now += 0.0002 + 0.0004 * len(found) + model * (len(drafted) % 5 < 2)
            drafted.append(1)
            return found

    prompt = zoo_llms.prompt_ids(zoo_llms.PROMPTS[0])
    drafter = Slow({tuple(prompt): zoo_llms.greedy(prompt, 44)}, 0.8, confidence=False)
    monkeypatch.setattr(target, "forward", forward)
    monkeypatch.setattr(cost_model, "REPEATS", 4)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    trace = record(target, [(0, prompt)], params, 60.0)
    costs = cost_model.measure(target, trace, seconds=5.0, contexts=(64,))
    (answer,) = trace.answers
    assert costs.forward[1](5, 64) == pytest.approx(0.0035, rel=0.01)
    assert costs.overhead == pytest.approx(0.0, abs=1e-6)
    draft = cost_model.measure_draft(target, drafter, None, trace, costs, 60.0)
    more = 0.0002 + cold + 0.4 * model
    assert (draft(2), draft(6)) == pytest.approx((0.0008 + more, 0.0024 + more), rel=0.05)
    replay = Replay(compose.build({"method": drafter}, target), target, trace, States(target))
    starts = replay.draft_everywhere(answer)
    for length in (1, 4, 10):
        predicted = costs.answer(answer, expect(starts, answer.log_p, length, "greedy", len(prompt)), draft)
        llm = zoo_llms.with_drafter(drafter, num_nodes=length, max_num_seqs=1, enable_prefix_caching=False)
        request = run_alone(llm, prompt, params)
        assert predicted == pytest.approx(request.metrics.emitted[-1].seconds, rel=0.02)


def test_costs_are_piecewise_linear_and_do_not_fall() -> None:
    assert [interpolate((1, 2, 4), (1.0, 2.0, 3.0), place) for place in (0, 1, 3, 6)] == [1.0, 1.0, 2.5, 4.0]
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    costs = cost_model.Costs({1: ForwardCosts((1, 8), (128,), [[1.0, 2.0]])}, 0.5)
    assert costs.ceiling == pytest.approx(17 / (1.0 + 16 / 7))
    assert costs.break_even(7, 128, DraftCosts((0,), (0.5,))) == 2.0
