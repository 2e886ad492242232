"""Planted faults of drafters and rules: one request ends with the reason, its neighbours' texts do not change."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import pytest
import torch

from foretoken import LLM
from foretoken.core.draft import NO_DRAFT, Draft, PointMass, ResumePoint
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.faults import Faults
from foretoken.engine.request import Request
from foretoken.engine.scheduler import Scheduler
from foretoken.forward.cache import KVCache
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.naive import NaiveVerifier
from foretoken_lab import testing as stubs
from helpers.asking import asked_when
from helpers.requests import make_request
from helpers.tiny_models import load_eager, save_model
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, prompt_ids, target, truth, with_config, with_drafter

CULPRIT = 2
LENGTH = 16
KANGAROO = {"method": "kangaroo", "adapter": "random:2", "num_speculative_tokens": 4}
DEL = {"method": "del", "exit_layer": 3, "draft_length": 3}
DEL_THAT_LEARNS = {"method": "del", "draft_length": 3, "reread_every": 1, "cost": "layers"}


def plan(max_tokens: int = LENGTH, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]


def is_culprit(context) -> bool:
    return list(context.tokens[: context.num_prompt]) == prompt_ids(PROMPTS[CULPRIT])


def only_the_culprit_ended(outputs, message: str) -> None:
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        if index == CULPRIT:
            assert output.finish_reason == "error"
            assert message in output.error
            assert output.token_ids == greedy(prompt, LENGTH)[: len(output.token_ids)]
        else:
            assert output.error is None
            assert output.token_ids == greedy(prompt, LENGTH)


# ---------------------------------------------------------------- drafters


@pytest.mark.parametrize("config", [KANGAROO, DEL, DEL_THAT_LEARNS], ids=["kangaroo", "del", "del that learns"])
@pytest.mark.parametrize("after", [0, 3], ids=["in the prompt", "later"])
def test_a_self_drafter_that_fails_to_see_a_forward_ends_one_request_only(config, after, caplog):
    """The released slot must not be written to: a neighbour would go on from rows that are not its own."""
    llm = with_config(config)
    asked_when(llm, lambda done: True)
    drafter = llm.recipe.drafter
    watched, seen = drafter.on_forward, 0

    def on_forward(features):
        nonlocal seen
        watched(features)
        for each in features:
            if is_culprit(each.context):
                seen += 1
                if seen > after:
                    raise RuntimeError("the drafter could not look")

    drafter.on_forward = on_forward
    outputs = llm.generate(PROMPTS, plan())
    only_the_culprit_ended(outputs, "the drafter could not look")
    blind = config is DEL  # of prompts it wants to see nothing
    assert bool(outputs[CULPRIT].token_ids) is bool(after or blind)
    assert "the drafter could not look" in caplog.text
    assert_idle(llm)


@pytest.mark.parametrize("config", [KANGAROO, DEL_THAT_LEARNS], ids=["kangaroo", "del"])
def test_the_last_slot_is_not_written_to_when_a_request_fails_in_front_of_it(config):
    """Two requests: the one in slot 0 fails, and slot -1 would be the neighbour's."""
    llm = with_config(config, max_num_seqs=2)
    drafter = llm.recipe.drafter
    watched = drafter.on_forward

    def on_forward(features):
        watched(features)
        if any(is_culprit(each.context) and len(each.draft) for each in features):
            raise RuntimeError("the drafter could not look")

    drafter.on_forward = on_forward
    bad, good = llm.generate([PROMPTS[CULPRIT], PROMPTS[0]], plan(30))
    assert bad.error == "the drafter could not look"
    assert good.error is None
    assert good.token_ids == greedy(PROMPTS[0], 30)
    assert_idle(llm)


@pytest.mark.parametrize("method", ["stub", "kangaroo"])
def test_a_drafter_that_fails_in_release_harms_no_request(method, caplog):
    llm = with_drafter(stubs.Oracle(truth())) if method == "stub" else with_config(KANGAROO)
    drafter = llm.recipe.drafter
    forget = drafter.release

    def release(request_id):
        forget(request_id)
        raise RuntimeError("the drafter cannot forget")

    drafter.release = release
    lengths = [3, 16, 7, 11, 5]
    outputs = llm.generate(PROMPTS, [plan(length) for length in lengths])
    for prompt, length, output in zip(PROMPTS, lengths, outputs, strict=True):
        assert (output.error, output.finish_reason) == (None, "length")
        assert output.token_ids == greedy(prompt, LENGTH)[:length]
    assert "the drafter cannot forget" in caplog.text
    assert_idle(llm)


class Wrong(stubs.Oracle):
    """The oracle; the culprit's drafts are what ``wrong`` makes of them."""

    def __init__(self, wrong) -> None:
        super().__init__(truth())
        self._wrong = wrong

    def draft(self, context, budget):
        good = super().draft(context, budget)
        return self._wrong(good) if is_culprit(context) and len(good) > 1 else good


def with_confidence(*values: float):
    return lambda draft: Draft(draft.tree, draft.law, tuple(values))


def resuming(depth: object, *, width: int = 384, dtype: torch.dtype = torch.float32):
    """Hidden states of a root and its nodes; the target has 8 layers and a width of 384."""
    return lambda draft: replace(draft, resume=ResumePoint(depth, torch.zeros(1 + len(draft), width, dtype=dtype)))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (with_confidence(0.5), "gave the confidences (0.5,)"),
        (with_confidence(*[0.5] * 40), "one probability for each"),
        (lambda draft: Draft(draft.tree, confidence=(float("nan"),) * len(draft)), "gave the confidences (nan"),
        (lambda draft: Draft(draft.tree, confidence=(1.5,) * len(draft)), "gave the confidences (1.5"),
        (lambda draft: Draft(draft.tree, confidence=("high",) * len(draft)), ""),
        (lambda draft: Draft(TokenTree([float(token) for token in draft.tree.tokens])), "tokens must be integers"),
        (lambda draft: Draft(TokenTree([True] * len(draft))), "tokens must be integers"),
        (lambda draft: None, ""),
        (
            lambda draft: Draft(draft.tree, resume=ResumePoint(2, torch.zeros(len(draft), 8))),
            "a resume point has one row for",
        ),
        (resuming(2, width=385), "385] with"),
        (resuming(2, dtype=torch.int64), "hidden states of torch.int64"),
        (resuming(9), "resumes at depth 9: it must be an integer from 0 to 8"),
        (resuming(-1), "resumes at depth -1"),
        (resuming(2.0), "resumes at depth 2.0"),
        (lambda draft: replace(draft, sources=("a",)), "named the sources ('a',)"),
        (lambda draft: replace(draft, sources=([],) * len(draft)), "named the sources ([], "),
        (lambda draft: replace(draft, sources=None), "named the sources None"),
        (lambda draft: replace(draft, moved_bytes=None), "moved None bytes"),
        (lambda draft: replace(draft, moved_bytes=-1), "moved -1 bytes"),
    ],
    ids=lambda each: each if isinstance(each, str) else "draft",
)
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_draft_that_is_not_in_order_ends_its_request_only(wrong, message, adaptive):
    llm = with_drafter(Wrong(wrong), num_nodes=4, adaptive=adaptive)
    if adaptive:  # in so short a text plain steps are not timed, so nothing would be drafted
        asked_when(llm, lambda done: True)
    only_the_culprit_ended(llm.generate(PROMPTS, plan()), message)
    assert_idle(llm)


# ---------------------------------------------------------------- rules


class WrongRule(NaiveVerifier):
    """The naive rule; the verdicts on the culprit's drafts are what ``wrong`` makes of them."""

    def __init__(self, wrong, *, batched: bool) -> None:
        super().__init__()
        self._wrong = wrong
        if not batched:
            self.offers = stubs.Stub.offers

    def _of(self, draft, verdict, rng):
        return self._wrong(draft, verdict) if rng.seed == CULPRIT and len(draft) else verdict

    def verify(self, draft, target, rng):
        return self._of(draft, super().verify(draft, target, rng), rng)

    def verify_batch(self, drafts, targets, rngs):
        verdicts = NaiveVerifier().verify_batch(drafts, targets, rngs)
        return [self._of(*each) for each in zip(drafts, verdicts, rngs, strict=True)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda draft, verdict: Verdict((), 1.0), "emitted the token 1.0"),
        (lambda draft, verdict: Verdict((), 10**6), "emitted the token 1000000"),
        (lambda draft, verdict: Verdict((), target().vocab_size), "emitted the token 8192"),
        (lambda draft, verdict: Verdict((), -1), "emitted the token -1"),
        (lambda draft, verdict: Verdict((), True), "emitted the token True"),
        (lambda draft, verdict: Verdict((), torch.tensor(5)), "emitted the token tensor(5)"),
        (lambda draft, verdict: Verdict((1,), 5), "accepted the nodes (1,)"),
        (lambda draft, verdict: Verdict((0, 0), 5), "accepted the nodes (0, 0)"),
        (lambda draft, verdict: Verdict((1, 0), 5), "accepted the nodes (1, 0)"),
        (lambda draft, verdict: Verdict((0, 2), 5), "accepted the nodes (0, 2)"),
        (lambda draft, verdict: Verdict((0, 1, 2, 3, 4), 5), "accepted the nodes (0, 1, 2, 3, 4)"),
        (lambda draft, verdict: Verdict((-1,), 5), "accepted the nodes (-1,)"),
        (lambda draft, verdict: Verdict((0.0,), 5), "accepted the nodes (0.0,)"),
        (lambda draft, verdict: Verdict(None, 5), "gave no verdict"),
        (lambda draft, verdict: None, "gave no verdict"),
        (lambda draft, verdict: (0, 5), "gave no verdict"),
        (lambda draft, verdict: Verdict((), 5, distortions=(float("nan"),)), "distortion"),
        (lambda draft, verdict: Verdict((), 5, distortions=(float("inf"),)), "distortion"),
        (lambda draft, verdict: Verdict((), 5, divergences=("far",)), "distortion"),
    ],
    ids=lambda each: each if isinstance(each, str) else "verdict",
)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one by one"])
def test_a_verdict_that_is_not_in_order_ends_its_request_only(wrong, message, batched):
    llm = with_drafter(stubs.Oracle(truth()), num_nodes=4, verifier=WrongRule(wrong, batched=batched))
    outputs = llm.generate(PROMPTS, [plan(seed=seed) for seed in range(len(PROMPTS))])
    only_the_culprit_ended(outputs, message)
    assert_idle(llm)


def test_drafts_that_resume_at_different_depths_end_no_other_request():
    """One forward goes on from one depth: a request with a draft of another depth is decoded plainly.

    Its own states are zeros, and no layer has stored its keys: the culprit reads what the memory held, numbers or not.
    """

    class Apart(stubs.Oracle):
        def draft(self, context, budget):
            good = super().draft(context, budget)
            depth = 8 if is_culprit(context) else 0
            return resuming(depth)(good) if len(good) else good

    llm = with_drafter(Apart(truth()), num_nodes=4)
    for index, (output, prompt) in enumerate(zip(llm.generate(PROMPTS, plan()), PROMPTS, strict=True)):
        if index != CULPRIT:
            assert output.error is None
            assert output.token_ids == greedy(prompt, LENGTH)
    assert_idle(llm)


@pytest.mark.parametrize(
    "change",
    [lambda each: each[:-1], lambda each: [*each, each[0]], lambda each: None],
    ids=["too few", "too many", "none"],
)
def test_a_wrong_number_of_verdicts_is_decided_one_by_one(change):
    class Miscounting(NaiveVerifier):
        def verify_batch(self, drafts, targets, rngs):
            sizes.append(len(drafts))
            verdicts = super().verify_batch(drafts, targets, rngs)
            return change(verdicts) if len(drafts) > 1 else verdicts

    sizes: list[int] = []
    llm = with_drafter(stubs.Oracle(truth()), num_nodes=4, verifier=Miscounting())
    outputs = llm.generate(PROMPTS, plan())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert max(sizes) > 1
    assert_idle(llm)


def test_a_batch_that_has_drawn_before_it_fails_moves_no_seed():
    class Failing(NaiveVerifier):
        def verify_batch(self, drafts, targets, rngs):
            sizes.append(len(drafts))
            verdicts = super().verify_batch(drafts, targets, rngs)
            if len(drafts) > 1:
                raise RuntimeError("planted")
            return verdicts

    sizes: list[int] = []
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True) for seed in range(3)]
    drawn = []
    for rule in (NaiveVerifier(), Failing()):
        llm = with_drafter(stubs.Oracle(truth()), num_nodes=4, verifier=rule)
        drawn.append([output.token_ids for output in llm.generate(PROMPTS[:3], params)])
    assert max(sizes) > 1
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("fault", ["raises", "another draft", "beyond the vocabulary"])
def test_a_rule_that_probes_wrongly_ends_its_request_only(fault):
    class Probing(NaiveVerifier):
        def probe(self, draft, context):
            if not is_culprit(context):
                return None
            tokens, parents = draft.tree.tokens, draft.tree.parents
            if fault == "raises":
                raise ZeroDivisionError("the rule broke")
            if fault == "another draft":
                return TokenTree([1, *tokens[1:]], parents)
            return TokenTree([*tokens, target().vocab_size], [*parents, -1])

    message = {
        "raises": "the rule broke",
        "another draft": "probes another draft",
        "beyond the vocabulary": "probes tokens from 8192",
    }
    llm = with_drafter(stubs.Oracle(truth()), num_nodes=4, verifier=Probing())
    only_the_culprit_ended(llm.generate(PROMPTS, plan()), message[fault])
    assert_idle(llm)


def test_no_draft_and_point_masses_are_still_welcome():
    """Negative control of the refusals above: an ordinary draft passes every one of these checks."""
    llm = with_drafter(Wrong(lambda draft: Draft(draft.tree, PointMass(), (0.5,) * len(draft))), num_nodes=4)
    outputs = llm.generate(PROMPTS, plan())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    silent = with_drafter(Wrong(lambda draft: NO_DRAFT), num_nodes=4).generate(PROMPTS, plan())
    assert [output.token_ids for output in silent] == [greedy(prompt, LENGTH) for prompt in PROMPTS]


# ---------------------------------------------------------------- tokens that the target cannot read


class Damaging(stubs.Stub):
    """Hangs a token next to which the target computes NaN, and what may follow it, on every root."""

    branches = True

    def draft(self, context, budget):
        return Draft(TokenTree([DAMAGED, 50, 51], [-1, 0, -1])) if budget.max_nodes >= 3 else NO_DRAFT


DAMAGED = 77


@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_draft_token_that_the_target_cannot_read_changes_nothing(family, params, tmp_path):
    """Also if the target emits that token itself, and nothing can follow."""
    folder = save_model(family, tmp_path)
    model = load_eager(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[DAMAGED] = torch.nan
    model.save_pretrained(folder)
    plain = LLM(folder, device="cpu", speculative_config=None)
    drafted = plain.with_method({"method": Damaging(), "num_speculative_tokens": 4})
    prompts = [{"prompt_token_ids": [1, each, 30, 40]} for each in (20, 21)]
    every = [plan(12, **params), plan(12, **params, logit_bias={DAMAGED: -100.0})]
    expected, outputs = plain.generate(prompts, every), drafted.generate(prompts, every)
    assert [(each.token_ids, each.error) for each in outputs] == [(each.token_ids, each.error) for each in expected]
    assert (outputs[1].error, outputs[1].metrics.num_draft_tokens > 8) == (None, True)
    assert (expected[0].error is not None) is bool(params)


# ---------------------------------------------------------------- without a model


def three(drafter: stubs.Stub) -> tuple[Faults, Scheduler, list[Request]]:
    """Two requests that run and one that waits."""
    scheduler = Scheduler(KVCache(1, 2, 1000), 16)
    requests = [make_request([5, 6]) for _ in range(3)]
    for request in requests:
        request.started = perf_counter()
        scheduler.add(request)
    scheduler.next()
    return Faults(scheduler, drafter), scheduler, requests


def test_a_request_leaves_once_from_wherever_it_is():
    began = perf_counter()
    faults, scheduler, requests = three(drafter := stubs.Recorder(stubs.Stub()))
    assert [request.slot for request in requests] == [0, 1, -1]
    stranger = make_request([5])
    for request in (*requests, stranger, *requests):
        faults.leave(request)
    assert drafter.released == {request.request_id: 1 for request in requests}
    assert not scheduler.busy
    assert scheduler.cache.free_slots == 2
    assert all(0.0 < request.metrics.seconds < perf_counter() - began for request in requests)


@pytest.mark.parametrize(("error", "message"), [(ValueError("why"), "why"), (ValueError(), "ValueError")])
def test_an_error_is_reported_by_its_message_or_its_kind(error, message):
    faults, scheduler, (request, *_) = three(stubs.Stub())
    faults.fail(request, error)
    assert (request.finish_reason, request.error) == ("error", message)
    assert request not in scheduler.running


@pytest.mark.parametrize("culprits", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("finished", [False, True])
def test_a_failed_batch_is_retried_one_by_one_and_only_failing_requests_end(culprits, finished):
    faults, _, requests = three(stubs.Stub())
    told: list[tuple[int, ...]] = []

    def learn(news):
        told.append(tuple(news))
        if set(news) & set(culprits):
            raise RuntimeError("cannot learn")

    if finished:
        requests[0].finish_reason = "stop"
    faults.tell(requests[:2], [0, 1], learn)
    assert told == [(0, 1), (0,), (1,)][: 3 if culprits else 1]
    reasons = ["error" if place in culprits else None for place in range(2)]
    assert [each.finish_reason for each in requests[:2]] == (["stop", reasons[1]] if finished else reasons)
