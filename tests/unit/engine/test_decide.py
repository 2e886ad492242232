"""Deciding without a model: each request's rows, in its distributions, by its rule; what a faulty verdict costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.laws import Laws
from foretoken.core.needs import Offers
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.decide import Decider
from foretoken.engine.faults import Faults
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request
from foretoken.engine.round import Job, Round
from foretoken.engine.scheduler import Scheduler
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlans
from foretoken.models.language_model import Output
from foretoken.verifiers.match import MatchVerifier
from foretoken_lab import testing as stubs
from helpers.requests import make_request

V = 100  # of make_request
NODES = Draft(TokenTree([7, 8]))


class Rule(MatchVerifier):
    """Emits given tokens, and records its arguments."""

    offers = Offers(batches=True)

    def __init__(self, *verdicts: object) -> None:
        self.shown: list[Laws] = []
        self.batches: list[int] = []
        self._verdicts = list(verdicts)

    def verify(self, draft, target, rng):
        self.shown.append(target)
        return self._verdicts.pop(0) if self._verdicts else Verdict((), 5)

    def verify_batch(self, drafts, targets, rngs):
        self.batches.append(len(drafts))
        return super().verify_batch(drafts, targets, rngs)


def decided(rule: Rule, jobs: Sequence[Job], logits_MV: torch.Tensor, states: Any = None) -> None:
    recipe = Recipe("stub", stubs.Stub(), rule, 4, False, False, DensePlans())
    scheduler = Scheduler(KVCache(1, 8, 1000), 64)
    for job in jobs:
        if not job.request.finished:
            scheduler.add(job.request)
    scheduler.next()
    current = Round(PackedBatch(), list(jobs), [], Output.of(logits_MV))
    Decider(recipe, V, states, Faults(scheduler, recipe.drafter)).decide(current)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    "params", [{}, {"repetition_penalty": 1.5}, {"temperature": 0.7, "logit_bias": {9: -math.inf}}], ids=str
)
def test_every_rule_sees_its_own_rows(params: dict[str, Any]) -> None:
    """A prompt's end after two rows that are only read, a draft with a probe after it, one that ended, a chunk."""
    ending, drafted, ended, chunk = (
        make_request([3, 4, 6], **params, prompt_logprobs=each) for each in (1, None, 0, 0)
    )
    ending.prompt_logprobs, chunk.prompt_logprobs = [], []
    ended.finish_reason = "stop"
    logits_MV = rows(10)
    jobs = [
        Job(ending, NO_DRAFT, 3, 1, prompt=True, read=2),
        Job(ended, NO_DRAFT, 1, 1),
        Job(drafted, NODES, 4, 4),
        Job(chunk, NO_DRAFT, 2, 0, prompt=True, read=2),
    ]
    decided(rule := Rule(Verdict((), 5), Verdict((0,), 9)), jobs, logits_MV)
    assert rule.batches == [2]
    first, second = rule.shown
    assert (first.positions[0], len(first)) == (3, 1)
    assert (list(second.positions), len(second)) == ([3, 4, 5], 3)
    assert torch.equal(first.raw_MV, logits_MV[2:3])
    assert torch.equal(second.raw_MV, logits_MV[4:7])
    assert first.probe_logits_PV is None
    assert torch.equal(second.probe_logits_PV, logits_MV[7:8])
    assert jobs[2].logits_MV is second.raw_MV
    assert first.stop_ids is ending.stop_ids
    for laws, request, draft in ((first, ending, NO_DRAFT), (second, drafted, NODES)):
        nodes = range(-1, len(draft))
        whole_MV = request.laws.process(laws.raw_MV, draft.tree, nodes)
        best = whole_MV.argmax(-1).tolist()
        assert list(laws.best) == best
        for row in nodes:
            assert torch.equal(laws.p_at(row + 1), Laws(whole_MV, greedy=laws.greedy, positions=nodes).p_at(row + 1))
    for request, begin in ((ending, 0), (chunk, 8)):
        logp = torch.log_softmax(logits_MV[begin : begin + 2], -1)
        assert request.prompt_logprobs is not None
        assert [each.token_id for each in request.prompt_logprobs] == [4, 6]
        assert [each.logprob for each in request.prompt_logprobs] == [float(logp[0, 4]), float(logp[1, 6])]
        assert [len(each.top) for each in request.prompt_logprobs] == [request.params.prompt_logprobs] * 2
    assert [job.verdict for job in jobs] == [Verdict((), 5), None, Verdict((0,), 9), None]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_none_end_their_request(value: float) -> None:
    bad, good = make_request([3]), make_request([4])
    logits_MV = rows(4)
    logits_MV[0, 50] = value
    jobs = [Job(bad, NODES, 3, 3), Job(good, NO_DRAFT, 1, 1)]
    decided(rule := Rule(), jobs, logits_MV)
    assert "NaN or infinite" in str(bad.error)
    assert (good.error, jobs[1].verdict) == (None, Verdict((), 5))
    assert rule.batches == []  # one request alone


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("damaged", "verdict", "expected"),
    [
        (1, Verdict((0, 1), 5, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)), Verdict((), 7, (0.1,), (1.0,))),
        (2, Verdict((0, 1), 5, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)), Verdict((0,), 8, (0.1, 0.2), (1.0, 2.0))),
        (1, Verdict((), 5), Verdict((), 5)),
        (2, Verdict((0,), 5), Verdict((0,), 5)),
        (3, Verdict((0, 1), 5), Verdict((0, 1), 5)),  # a probe
    ],
    ids=str,
)
def test_a_draft_is_decided_up_to_the_first_invalid_row(
    value: float, damaged: int, verdict: Verdict, expected: Verdict
) -> None:
    """A draft never breaks a request: a token after which nothing can follow is emitted if it is accepted."""
    request = make_request([3], temperature=1.0)
    logits_MV = rows(4)
    sound_MV = logits_MV.clone()
    logits_MV[damaged, 50] = value
    job = Job(request, NODES, 4, 4)
    decided(rule := Rule(verdict), [job], logits_MV)
    assert (request.error, job.verdict) == (None, expected)
    (laws,) = rule.shown
    assert bool(laws.p_MV.isfinite().all())
    for row in {0, 1, 2} - {damaged}:
        assert torch.equal(laws.raw_MV[row], sound_MV[row])
    assert (laws.probe_logits_PV is None) == (damaged == 3)


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (Verdict((), V - 1), None),
        (Verdict((), 0), None),
        (Verdict((0, 1), 5, distortions=(0.0, 1, 0.5), divergences=(math.inf,)), None),
        (Verdict((), V), "emitted the token 100"),
        (Verdict((), -1), "emitted the token -1"),
        (Verdict((1,), 5), "no path"),
        (Verdict((2,), 5), "no path"),
        (Verdict((), 5, distortions=(-0.1,)), "distortion -0.1"),
        (Verdict((), 5, divergences=(math.nan,)), "distortion nan"),
    ],
    ids=str,
)
def test_a_verdict_is_a_path_and_one_token(verdict: Verdict, message: str | None) -> None:
    request: Request = make_request([3])
    job = Job(request, NODES, 3, 3)
    decided(Rule(verdict), [job], rows(3))
    assert job.verdict == (verdict if message is None else None)
    assert request.error is None if message is None else message in str(request.error)


class States:
    """The number of its row is a row's state."""

    def of(self, output: Output, rows: range) -> torch.Tensor:
        return torch.tensor([*rows])


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_a_rule_sees_the_states_of_its_draft_s_rows(params: dict[str, Any]) -> None:
    """After another request's row, and in front of one that is probed."""
    jobs = [Job(make_request([3]), NO_DRAFT, 1, 1), Job(make_request([4], **params), NODES, 4, 4)]
    decided(rule := Rule(), jobs, rows(5), States())
    assert rule.shown[1].hidden_MD.tolist() == [1, 2, 3]


class Guessing(Rule):
    """Takes every guess."""

    def finish(self, verdict, guess, target, rng, spent):
        self.asked = (guess.tree.tokens, verdict.path)
        if guess.tree.tokens == (99,):
            raise RuntimeError("cannot finish")
        return Verdict(verdict.path, guess.tree.tokens[0]) if guess.tree.tokens[0] else verdict


@pytest.mark.parametrize(
    ("path", "guess", "extra", "error"),
    [((0, 1), 11, 11, None), ((0, 1), 0, 5, None), ((0,), 11, 5, None), ((0, 1), 99, None, "cannot finish")],
)
def test_a_guess_is_coupled_where_all_before_it_stood(
    path: tuple[int, ...], guess: int, extra: int | None, error: str | None
) -> None:
    job = Job(make_request([3]), NODES, 3, 3, guess=Draft(TokenTree([guess])))
    decided(rule := Guessing(Verdict(path, 5)), [job], rows(3))
    assert job.request.error == error
    if error is None:
        assert job.verdict == Verdict(path, extra)  # type: ignore[arg-type]
    assert getattr(rule, "asked", None) == (((guess,), path) if len(path) == 2 else None)


def test_a_request_without_a_guess_does_not_block_others() -> None:
    plain, guessed = make_request([3]), make_request([4])
    jobs = [Job(plain, NO_DRAFT, 1, 1), Job(guessed, NODES, 3, 3, guess=Draft(TokenTree([11])))]
    decided(Guessing(Verdict((), 5), Verdict((0, 1), 5)), jobs, rows(4))
    assert [job.verdict for job in jobs] == [Verdict((), 5), Verdict((0, 1), 11)]
