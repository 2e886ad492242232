"""Drafter and target at the same time: the paper's rounds, nothing left, and words where it cannot be."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Context
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.drafting import draft_runner
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.executors.auto import _SETTLING, _TRIAL, _Turns
from foretoken.engine.executors.overlap import OverlapRule
from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.worker_thread import WorkerThread, split
from foretoken.engine.llm import LLM
from foretoken.engine.scheduler import Work
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab import testing as stubs
from foretoken_lab.timeline import watch
from helpers.adapters import shelf
from helpers.small_llms import ALTERED, PROMPTS, assert_idle, base, ids, with_config
from helpers.threads import one_thread
from helpers.tiny_models import VOCAB_SIZE, save_model

__all__ = ["one_thread"]

PEARL = {"method": "draft_model", "model": ALTERED, "executor": "pearl"}
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)


@cache
def tiny() -> LLM:
    """A target of three layers; its text is known beforehand."""
    return LLM.from_target(load(save_model("llama", shelf() / "executors"), device="cpu"), seed=0)


# ---------------------------------------------------------------------------------------------- rounds of the paper


def closed_form(alpha: float, gamma: int) -> float:
    """Tokens per round where every token stands with chance alpha."""
    return (1 - alpha**gamma) / ((1 - alpha) * (1 - alpha**gamma + alpha))


def rounds(stands: Callable[[int], bool], gamma: int, count: int) -> tuple[int, int]:
    """Algorithm 2 of the paper on a text: rounds and verified tokens, until so many are verified.

    ``stands(j)`` says whether the draft's token at position j is the target's, given all before it are.
    """
    verified = num_rounds = 0
    pending: list[int] | None = None  # positions that were drafted and not verified; None: pre-verify
    while verified < count:
        num_rounds += 1
        tested = [verified] if pending is None else [*pending, pending[-1] + 1]
        passed = next((i for i, place in enumerate(tested) if not stands(place)), None)
        if passed is not None:
            verified += passed + 1  # the target's own token takes the place of the first that fell
            pending = None
        else:
            verified += len(tested)
            pending = list(range(verified, verified + gamma - 1)) or None
    return num_rounds, verified


@pytest.mark.parametrize(("gamma", "expected"), [(2, 1.344), (4, 1.595), (6, 1.678)])
def test_the_closed_form_is_what_the_paper_s_rounds_come_to(gamma: int, expected: float) -> None:
    assert closed_form(0.65, gamma) == pytest.approx(expected, abs=5e-4)
    dice = random.Random(gamma)
    coins = [dice.random() < 0.65 for _ in range(400_000)]
    num_rounds, verified = rounds(coins.__getitem__, gamma, 300_000)
    assert verified / num_rounds == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
def test_the_engine_takes_the_paper_s_rounds(gamma: int, alpha: float) -> None:
    """Step for step, for the same coins: pre- and post-verify are the one step with a guess."""
    prompt = [5, 40, 9]
    (plain,) = tiny().generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=120, ignore_eos=True))
    texts = {tuple(prompt): plain.token_ids}
    drafter = stubs.Scripted(texts, alpha)
    config = {"method": drafter, "num_speculative_tokens": gamma, "executor": "pearl"}
    llm = LLM.from_target(tiny().target, speculative_config=config)
    # the script ends with the text, and the comparison with the script
    (request,) = llm.new_requests({"prompt_token_ids": prompt}, SamplingParams(max_tokens=120, ignore_eos=True))
    llm.engine.add(request)
    steps = 0
    while request.num_output < 100:
        llm.engine.step()
        steps += request.num_output > 1
    spoilt = [drafter.spoilt(tuple(prompt), place, [token])[0] for place, token in enumerate(plain.token_ids)]
    stood = [a == b for a, b in zip(spoilt, plain.token_ids, strict=True)]
    # the first token comes with the prompt; then the rounds begin
    num_rounds, verified = rounds(lambda place: stood[place + 1], gamma, request.num_output - 1)
    assert (steps, request.num_output) == (num_rounds, verified + 1)
    assert request.output_ids == plain.token_ids[: request.num_output]
    llm.engine.cancel(request)
    assert_idle(llm)


def test_discarded_drafts_are_counted_apart() -> None:
    prompt = [5, 40, 9]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (plain,) = tiny().generate([{"prompt_token_ids": prompt}], params)
    for drafter, stood in ((stubs.AlwaysWrong, 0), (stubs.Oracle, 1)):
        method = drafter({tuple(prompt): plain.token_ids})
        config = {"method": method, "num_speculative_tokens": 4, "executor": "pearl"}
        (out,) = LLM.from_target(tiny().target, speculative_config=config).generate(
            [{"prompt_token_ids": prompt}], params
        )
        metrics = out.metrics
        assert out.token_ids == plain.token_ids
        assert metrics.num_accepted_tokens == stood * metrics.num_draft_tokens
        if stood:
            assert metrics.num_steps < 12
            assert metrics.num_discarded_tokens == 0
        else:
            # a guess is tested in every step but the last, which needs none; after it up to three are in vain
            assert metrics.num_draft_tokens == metrics.num_steps - 2 == 28
            assert metrics.drafted_at == [28]
            assert metrics.num_discarded_tokens == 25 * 3 + 2 + 1


# ------------------------------------------------------------------------------------------------ same text, same rows


@pytest.mark.parametrize("length", [None, 1, 3, 6])
def test_a_batch_gives_the_text_of_plain_decoding(length: int | None) -> None:
    llm = with_config({**PEARL, "num_speculative_tokens": length})
    assert ids(llm.generate(list(PROMPTS), GREEDY)) == ids(base().generate(list(PROMPTS), GREEDY))
    assert_idle(llm)
    llm.close()


@pytest.mark.parametrize("tree", ["chain", "coupled"])
def test_a_seed_gives_its_stream_under_match(tree: str) -> None:
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=11, top_p=0.9, repetition_penalty=1.2, min_tokens=8)
    llm = with_config({**PEARL, "tree": tree, "verifier": "match"})
    assert ids(llm.generate(list(PROMPTS), params)) == ids(base().generate(list(PROMPTS), params))


def test_a_seed_gives_its_text_in_any_batch_and_at_any_pace() -> None:
    """Drawn drafts: their length must follow from the request's own past, not from how long the target took."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    llm = with_config(PEARL)
    alone = [ids(llm.generate([prompt], params))[0] for prompt in PROMPTS[:3]]
    forward = llm.engine.forward
    dice = random.Random(1)

    def late(current):
        time.sleep(dice.choice([0.0, 0.003]))
        forward(current)

    llm.engine.forward = late  # type: ignore[method-assign]
    assert ids(llm.generate(list(PROMPTS[:3]), params)) == alone


def test_stop_strings_and_limits_see_verified_tokens_only() -> None:
    for params in (
        SamplingParams(max_tokens=64, stop="."),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=64),
    ):
        llm = with_config({**PEARL, "num_speculative_tokens": 5})
        found, expected = llm.generate(list(PROMPTS), params), base().generate(list(PROMPTS), params)
        assert [(out.text, out.token_ids, out.outputs[0].finish_reason) for out in found] == [
            (out.text, out.token_ids, out.outputs[0].finish_reason) for out in expected
        ]


class Compared(stubs.Stub):
    """A draft model that compares each of its proposals with that of one without a past."""

    def __init__(self, inner: ModelDrafter, fresh: Callable[[], ModelDrafter]) -> None:
        self.laws = inner.laws
        self.differing: list[tuple[Sequence[int], Sequence[int]]] = []
        self.num_asked = 0
        self._inner, self._fresh = inner, fresh

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]):
        found = self._inner.propose(contexts, budgets)
        own = self._fresh()
        for context, budget, draft in zip(contexts, budgets, found, strict=True):
            self.num_asked += 1
            (alone,) = own.propose([context], [budget])
            own.release(context.request_id)
            if alone.tree.tokens != draft.tree.tokens or alone.confidence != draft.confidence:
                self.differing.append((alone.tree.tokens, draft.tree.tokens))
        return found

    def release(self, request_id: int) -> None:
        self._inner.release(request_id)


def compared() -> Compared:
    def fresh() -> ModelDrafter:
        drafter = with_config({"method": "draft_model", "model": ALTERED}).recipe.drafter
        assert isinstance(drafter, ModelDrafter)
        return drafter

    own = fresh()
    return Compared(fresh(), lambda: own)


def now_and_then(drafter: Compared) -> list[list[int]]:
    """Drafted ahead for three steps, then not for two, in turns: so the drafter sees rejected tokens late."""
    llm = with_config({"method": drafter, "num_speculative_tokens": 5, "executor": "pearl"})
    room, num_steps = llm.engine.node_budgets, 0

    def sometimes(work: Work) -> list[int]:
        nonlocal num_steps
        num_steps += 1
        return [0] * len(work.decoding) if num_steps % 5 < 2 else room(work)

    llm.engine.node_budgets = sometimes  # type: ignore[method-assign]
    return ids(llm.generate(list(PROMPTS), GREEDY))


def test_the_drafter_reads_its_context_after_any_rejection() -> None:
    """To the last bit of a confidence: its cache has no row of a token that did not stand."""
    drafter = compared()
    now_and_then(drafter)
    assert drafter.num_asked > 20
    assert not drafter.differing


def test_a_drafter_that_looks_at_lengths_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: rows are kept as far as lengths agree. The text is right all the same."""
    monkeypatch.setattr(draft_runner, "common_length", lambda read, tokens: min(len(read), len(tokens)))
    drafter = compared()
    assert now_and_then(drafter) == ids(base().generate(list(PROMPTS), GREEDY))
    assert drafter.differing


# ------------------------------------------------------------------------------------------------------ order of work


class Slow(stubs.Random):
    """Takes its time to propose, and notes on which thread."""

    def __init__(self, seconds: float) -> None:
        super().__init__(VOCAB_SIZE, tree=False, full=True)
        self.seconds = seconds
        self.threads: set[str] = set()

    def draft(self, context: Context, budget: Budget):
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return super().draft(context, budget)


def slow_pair(seconds: float) -> tuple[LLM, Slow]:
    drafter = Slow(seconds)
    config = {"method": drafter, "num_speculative_tokens": 3, "executor": "pearl"}
    llm = LLM.from_target(tiny().target, speculative_config=config)
    forward = llm.engine.forward

    def slow(current):
        time.sleep(seconds)
        forward(current)

    llm.engine.forward = slow  # type: ignore[method-assign]
    return llm, drafter


class Watchful(stubs.Random):
    """Notes a release that comes while it proposes."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, tree=False, full=True)
        self.busy = False
        self.released: list[bool] = []

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]):
        self.busy = True
        time.sleep(0.02)
        found = super().propose(contexts, budgets)
        self.busy = False
        return found

    def release(self, request_id: int) -> None:
        self.released.append(self.busy)


def test_drafter_and_target_are_busy_at_the_same_time() -> None:
    llm, drafter = slow_pair(0.05)
    timeline = watch(llm)
    assert timeline is not None
    llm.generate([{"prompt_token_ids": [5, 9]}], SamplingParams(max_tokens=4, ignore_eos=True))
    assert all(name.startswith("foretoken-worker") for name in drafter.threads)
    busy = {who: [each for each in timeline.intervals if each.actor == who] for who in ("drafter", "target")}
    both = [
        min(a.end, b.end) - max(a.begin, b.begin)
        for a, b in zip(busy["drafter"], busy["target"], strict=True)
        if a.end - a.begin > 0.04
    ]
    assert both
    assert min(both) > 0.02
    llm.close()


def test_an_interrupt_in_the_middle_of_a_step_finds_the_lane_at_rest() -> None:
    llm, _ = slow_pair(0.02)
    forward = llm.engine.forward
    texts = [{"prompt_token_ids": [5, 9]}, {"prompt_token_ids": [7]}]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = ids(tiny().generate(texts, params))

    def interrupted(current):
        raise KeyboardInterrupt

    llm.generate(texts[:1], params)
    llm.engine.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(texts, params)
    assert_idle(llm)
    llm.engine.forward = forward  # type: ignore[method-assign]
    assert ids(llm.generate(texts, params)) == expected


def test_an_interrupted_request_is_released_at_rest() -> None:
    """It is cancelled while the exception goes up: not before the drafter has come to an end."""
    drafter = Watchful()
    config = {"method": drafter, "num_speculative_tokens": 3, "executor": "pearl"}
    llm = LLM.from_target(tiny().target, speculative_config=config)
    forward, num_steps = llm.engine.forward, 0

    def interrupted(current) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        forward(current)

    llm.engine.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [5, 9]}], SamplingParams(max_tokens=8, ignore_eos=True))
    assert drafter.released == [False]
    llm.close()


def test_a_request_that_ends_before_the_forward_is_released_at_rest() -> None:
    """Its rows cannot be reserved; the other request goes on, and the drafter releases it while it is idle."""
    drafter = Watchful()
    config = {"method": drafter, "num_speculative_tokens": 3, "executor": "pearl"}
    llm = LLM.from_target(tiny().target, speculative_config=config)
    reserve, num_calls = llm.engine.cache.reserve, 0

    def failing(slot: int, num_rows: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            raise MemoryError("planted")
        reserve(slot, num_rows)

    llm.engine.cache.reserve = failing  # type: ignore[method-assign]
    outputs = llm.generate([{"prompt_token_ids": [5, 9]}, {"prompt_token_ids": [7]}], SamplingParams(max_tokens=8))
    assert sorted(out.outputs[0].error or "" for out in outputs) == ["", "planted"]
    assert drafter.released == [False, False]
    llm.close()


def test_closing_ends_the_thread_and_another_request_starts_it_again() -> None:
    llm, _ = slow_pair(0.0)
    prompt, params = [{"prompt_token_ids": [5, 9]}], SamplingParams(max_tokens=6, ignore_eos=True)
    before = threading.active_count()
    first = ids(llm.generate(prompt, params))
    assert threading.active_count() == before + 1
    llm.close()
    assert threading.active_count() == before
    assert ids(llm.generate(prompt, params)) == first
    llm.close()


def test_the_threads_are_split_and_neither_side_goes_without() -> None:
    assert [split(threads) for threads in (1, 2, 8, 16)] == [(1, 1), (1, 1), (7, 1), (14, 2)]
    assert sum(split()) == max(2, torch.get_num_threads())


def test_a_worker_thread_passes_on_an_error_and_remains_usable() -> None:
    worker = WorkerThread(1)

    def fails(stopped: Callable[[], bool]) -> None:
        raise ValueError("planted")

    task = worker.begin(fails)
    task.stop_and_wait()
    with pytest.raises(ValueError, match="planted"):
        task.result()
    assert worker.begin(lambda stopped: 7).result() == 7
    worker.close()


def test_a_worker_thread_runs_one_task_at_a_time() -> None:
    worker, done, gate = WorkerThread(1), list[int](), threading.Event()

    def first(stopped: Callable[[], bool]) -> None:
        gate.wait(5.0)
        done.append(1)

    tasks = [worker.begin(first), worker.begin(lambda stopped: done.append(2))]
    time.sleep(0.02)
    gate.set()
    for task in tasks:
        task.result()
    worker.close()
    assert done == [1, 2]


def test_each_side_has_its_share_of_the_threads(monkeypatch) -> None:
    monkeypatch.setattr("foretoken.engine.executors.overlapped.split", lambda: (5, 3))
    executor = OverlappedExecutor()
    worker, team = executor._threads()
    assert (team.threads, worker.team.threads) == (5, 3)
    assert executor._threads() == (worker, team)
    executor.close()


def test_a_child_of_a_fork_has_a_thread_of_its_own_and_may_be_closed_twice(monkeypatch) -> None:
    worker = WorkerThread(1)
    thread = worker.begin(lambda stopped: threading.current_thread()).result()
    parents = worker._pool
    assert parents is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert worker.begin(lambda stopped: threading.current_thread()).result() is not thread
        worker.close()
        worker.close()
    parents.shutdown()


# ---------------------------------------------------------------------------------------------------- what fits, auto


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"method": "ngram"}, "does not offer to draft ahead"),
        ({"method": "none"}, "nothing is drafted"),
        ({"method": "kangaroo", "adapter": "random:1"}, "has to wait for it"),
        ({**PEARL, "tree": "topk"}, "set to propose trees"),
        ({**PEARL, "verifier": "reflective"}, "looks at more of a draft"),
        ({**PEARL, "verification.ffn": 0.05}, "verifies sparsely"),
    ],
)
def test_what_cannot_draft_ahead_is_refused_in_words(config, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"executor='pearl' does not go.*{why}.*executor='serial'"):
        with_config({**config, "executor": "pearl"})
    recipe = with_config({**config, "executor": "auto"}).recipe
    assert recipe.executor == "serial"
    assert why in recipe.explanation


def test_an_unknown_executor_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"executor='perl'.*'pearl'"):
        with_config({**PEARL, "executor": "perl"})


class Past(OwnPastRule):
    """Answers by a script, and records its arguments."""

    def __init__(self, pays: bool) -> None:
        super().__init__(0.1)
        self.pays = pays
        self.asked: list[tuple[float, float, int]] = []

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        self.asked.append((reach, confidence, num_nodes))
        return self.pays


@pytest.mark.parametrize(
    ("num_nodes", "pays", "stopped", "drafted"),
    [(0, False, True, True), (1, True, False, True), (1, True, True, False), (1, False, False, False)],
)
def test_ahead_is_drafted_what_pays_until_the_target_is_done(num_nodes, pays, stopped, drafted) -> None:
    rule = OverlapRule(past := Past(pays), lambda: stopped)
    assert rule.worthwhile(0.5, 0.25, num_nodes) is drafted
    assert past.asked == [(0.5, 0.25, num_nodes)]  # the first one, too: its result is for the path below


def feed(turns: _Turns, rates: dict[bool, float], steps: int) -> list[bool]:
    """Which order each step had, where a token takes what the rates say."""
    had = []
    for _ in range(steps):
        had.append(turns.ahead)
        turns.measure(2, 2 / rates[turns.ahead])
    return had


@pytest.mark.parametrize(("ahead", "wins"), [(150.0, True), (100.5, False), (50.0, False)])
def test_the_faster_order_gets_nearly_all_turns(ahead: float, wins: bool) -> None:
    turns = _Turns()
    had = feed(turns, {False: 100.0, True: ahead}, 2 * (_SETTLING + _TRIAL))
    assert had == [False] * (_SETTLING + _TRIAL) + [True] * (_SETTLING + _TRIAL)
    had = feed(turns, {False: 100.0, True: ahead}, 20_000)
    assert sum(each is not wins for each in had) <= 0.02 * len(had)


def runs(had: list[bool]) -> list[tuple[bool, int]]:
    """Turns of one order after another, and how long each was."""
    return [(ahead, len([*each])) for ahead, each in groupby(had)]


def test_the_slower_order_is_tried_again_after_rests_that_double_until_the_other_one_wins() -> None:
    turns, trial = _Turns(), _SETTLING + _TRIAL
    had = feed(turns, {False: 100.0, True: 50.0}, 7 * trial + 2048 + 4096 + 8192 + 2 * 16384)
    rests = (trial, 2048, 4096, 8192, 16384, 16384)
    assert runs(had) == [each for rest in rests for each in ((False, rest), (True, trial))]
    had = feed(turns, {False: 100.0, True: 200.0}, 16384 + trial + 1024 + trial)
    assert runs(had) == [(False, 16384), (True, trial + 1024), (False, trial)]


def test_the_first_steps_of_a_turn_are_not_counted() -> None:
    turns = _Turns()
    for _ in range(2):
        for step in range(_SETTLING + _TRIAL):
            turns.measure(2, 100.0 if step < _SETTLING else 1.0)
    assert turns.rates == {False: 2.0, True: 2.0}
    timeless = _Turns()
    for _ in range(_SETTLING + _TRIAL):
        timeless.measure(2, 0.0)
    assert timeless.rates == {False: 0.0}


def test_an_order_that_has_become_faster_is_found() -> None:
    turns = _Turns()
    feed(turns, {False: 100.0, True: 50.0}, 200)
    had = feed(turns, {False: 100.0, True: 200.0}, 4000)
    assert had[-1]


def test_auto_gives_the_text_and_reports_its_choice() -> None:
    llm = with_config({**PEARL, "executor": "auto"})
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    assert ids(llm.generate([PROMPTS[0]], params)) == ids(base().generate([PROMPTS[0]], params))
    assert "1 request: serial" in llm.engine.executor.explanation  # type: ignore[attr-defined]


def test_auto_leaves_seeded_requests_of_drawn_drafts_to_the_serial_order() -> None:
    """The faster order is measured, and the text must not depend on the measurement."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    texts = [
        ids(with_config({**PEARL, "executor": each}).generate([PROMPTS[0]], params)) for each in ("auto", "serial")
    ]
    assert texts[0] == texts[1]
