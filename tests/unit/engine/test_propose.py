"""The budget of each draft: nodes, depth, and the tokens that a request may still emit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from foretoken.core.constraint import Constraint
from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, PointMass, ResumePoint, Sampled
from foretoken.core.needs import HiddenLayers, Needs
from foretoken.core.protocols import Budget, Context
from foretoken.core.tree import TokenTree
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.executors.overlap import AssumedContext, OverlapRule
from foretoken.engine.faults import Faults
from foretoken.engine.features.feature_backlog import FeatureBacklog
from foretoken.engine.propose import Proposer
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request
from foretoken.forward.dense import DensePlans
from foretoken.verifiers.ratio import RatioVerifier
from foretoken_lab.testing import Stub
from helpers.requests import make_request


class Noting(Stub):
    """Keeps the budgets that it was given."""

    def __init__(self) -> None:
        self.budgets: list[Budget] = []

    def draft(self, context: Context, budget: Budget) -> Draft:
        self.budgets.append(budget)
        return Draft(TokenTree(range(min(budget.max_nodes, budget.max_depth))), PointMass())


def proposer_of(
    recipe: Recipe, faults: Faults, max_length: int = 1000, controller: Controller | None = None
) -> Proposer:
    unseen = FeatureBacklog(recipe.drafter, faults)
    controller = controller or Controller()
    target: Any = SimpleNamespace(vocab_size=100, num_layers=4, width=8)
    return Proposer(recipe, target, max_length, controller, faults, unseen, own_nodes=2, own_rows=2, node_cost=0.1)


def budgets(
    requests: Sequence[Request], *, num_nodes: int = 6, spare: int = 100, max_length: int = 1000, adaptive: bool = False
) -> list[Budget]:
    drafter = Noting()
    recipe = Recipe("noting", drafter, RatioVerifier(), num_nodes, adaptive, False, DensePlans())
    proposer = proposer_of(recipe, cast(Faults, None), max_length)  # no request fails
    for request in requests:
        request.history_only = recipe.history_only(request.params)
    failed: list[Any] = []
    drafts = proposer.propose(requests, spare, failed)
    assert not failed
    assert len(drafts) == len(requests)
    if drafter.budgets:
        return drafter.budgets
    assert not any(map(len, drafts))  # no request may draft, so the drafter is not called
    return [Budget(0, 0)] * len(requests)


@pytest.mark.parametrize(
    ("room", "depth", "nodes"), [(1, 0, 0), (2, 1, 6), (4, 3, 6), (6, 5, 6), (7, 6, 6), (8, 6, 6), (50, 6, 6)]
)
def test_a_draft_is_one_shorter_than_what_may_still_be_emitted(room: int, depth: int, nodes: int) -> None:
    (budget,) = budgets([make_request([9, 9], max_tokens=room)])
    assert (budget.max_depth, budget.max_nodes) == (depth, nodes)


def test_a_tree_fits_into_the_cache() -> None:
    (budget,) = budgets([make_request([9] * 7, max_tokens=50)], max_length=10)
    assert budget.max_nodes == 3


@pytest.mark.parametrize(("most", "nodes"), [(None, 6), (0, 0), (2, 2), (9, 6)])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_request_may_ask_for_less(most: int | None, nodes: int, seed: int | None) -> None:
    asking = make_request([9], max_tokens=50, temperature=1.0, seed=seed)
    asking.max_draft = most
    other = make_request([9], max_tokens=50)
    mine, theirs = budgets([asking, other])
    assert (mine.max_nodes, theirs.max_nodes) == (min(nodes, 2) if seed else nodes, 6)


def test_spare_rows_are_shared_evenly() -> None:
    requests = [make_request([9], max_tokens=50) for _ in range(3)]
    assert [each.max_nodes for each in budgets(requests, spare=11)] == [3, 3, 3]
    assert [each.max_nodes for each in budgets(requests, spare=2)] == [0, 0, 0]


def test_a_seeded_request_has_rows_of_its_own_and_a_rule_of_its_own() -> None:
    seeded = make_request([9], max_tokens=50, temperature=1.0, seed=1)
    other = make_request([9], max_tokens=50, temperature=1.0)
    first, second = budgets([seeded, other], spare=5, adaptive=True)
    assert (first.max_nodes, first.history_only, type(first.stop_rule)) == (2, True, OwnPastRule)
    assert (second.max_nodes, second.history_only, second.stop_rule) == (3, False, None)
    assert seeded.own_rule is first.stop_rule
    assert [seeded.own_rule.worthwhile(1.0, each, 0) for each in (0.05, 0.15)] == [False, True]  # a node costs a tenth


class Failing(Stub):
    """Fails for one request; resumes at the depths that it was given, and draws a number for each draft."""

    def __init__(self, culprit: int, depths: Sequence[int | None] = ()) -> None:
        self.culprit = culprit
        self.depths = depths
        self.asked: list[int] = []
        self.drawn: list[list[bool]] = []

    def draft(self, context: Context, budget: Budget) -> Draft:
        self.asked.append(context.request_id)
        self.drawn.append(context.streams.bernoulli("draft", [0.5] * 30))
        if context.request_id == self.culprit:
            raise ValueError("no draft for this one")
        depth = self.depths[context.tokens[0]] if self.depths else None
        resume = None if depth is None else ResumePoint(depth, torch.zeros(2, 8))
        return Draft(TokenTree([context.tokens[0]]), PointMass(), resume=resume)


class Noted:
    """The ended requests, and the reasons."""

    def __init__(self) -> None:
        self.ended: list[tuple[Request, str]] = []

    def fail(self, request: Request, error: Exception) -> None:
        self.ended.append((request, str(error)))


def ask(drafter: Failing, requests: Sequence[Request]) -> tuple[list[Draft], list[Request], Noted]:
    recipe = Recipe("failing", drafter, RatioVerifier(), 3, False, False, DensePlans())
    faults, failed = Noted(), list[Request]()
    return proposer_of(recipe, cast(Faults, faults)).propose(requests, 100, failed), failed, faults


def test_a_request_without_a_draft_ends_alone_and_the_others_are_drafted_one_by_one() -> None:
    requests = [make_request([number], max_tokens=50, temperature=1.0, seed=number) for number in range(3)]
    drafter = Failing(culprit=requests[1].request_id)
    drafts, failed, faults = ask(drafter, requests)
    assert [draft.tree.tokens for draft in drafts] == [(0,), (), (2,)]
    assert failed == [requests[1]]
    assert faults.ended == [(requests[1], "no draft for this one")]
    ids = [request.request_id for request in requests]
    assert drafter.asked == [*ids[:2], *ids]
    assert drafter.drawn[:2] == drafter.drawn[2:4]  # seeded: drawn again from where the streams stood


def test_one_request_alone_that_has_no_draft_ends() -> None:
    (request,) = [make_request([0], max_tokens=50)]
    drafts, failed, faults = ask(Failing(culprit=request.request_id), [request])
    assert [len(draft) for draft in drafts] == [0]
    assert failed == [request]
    assert faults.ended == [(request, "no draft for this one")]


def test_drafts_that_were_made_alone_resume_at_one_depth() -> None:
    requests = [make_request([number], max_tokens=50) for number in range(6)]
    drafter = Failing(requests[5].request_id, [None, 4, 2, 4, None, None])
    drafts, _, _ = ask(drafter, requests)
    assert [draft.tree.tokens for draft in drafts] == [(0,), (1,), (), (3,), (4,), ()]


@pytest.mark.parametrize(
    ("confidence", "good"), [((0.0, 1.0), True), ((), True), ((0.5,), False), ((0.5, 1.1), False), ((-0.1, 1.0), False)]
)
def test_a_confidence_may_be_nothing_or_certain_and_no_more(confidence: tuple[float, ...], good: bool) -> None:
    class Sure(Stub):
        def draft(self, context: Context, budget: Budget) -> Draft:
            return Draft(TokenTree([1, 2]), PointMass(), confidence=confidence)

    recipe, faults, failed = Recipe("sure", Sure(), RatioVerifier(), 3, False, False, DensePlans()), Noted(), []
    proposer = proposer_of(recipe, cast(Faults, faults))
    (draft,) = proposer.propose([make_request([9], max_tokens=50)], 100, cast(list[Request], failed))
    assert (len(draft), len(failed), len(faults.ended)) == ((2, 0, 0) if good else (0, 1, 1))


def test_rows_are_shared_by_requests_that_the_controller_lets_draft() -> None:
    """In the first steps none; then one of them tries."""
    requests = [make_request([9] * length, max_tokens=50) for length in (9, 2, 5)]
    drafter = Noting()
    recipe = Recipe("noting", drafter, RatioVerifier(), 6, False, True, DensePlans())
    controller = Controller()
    proposer = proposer_of(recipe, cast(Faults, None), controller=controller)
    for _ in range(3):
        assert [len(draft) for draft in proposer.propose(requests, 5, [])] == [0, 0, 0]
        controller.measure(num_requests=3, nodes=0, draft=0.0, total=3.0)
    assert not drafter.budgets
    proposer.propose(requests, 5, [])
    found = [budget.max_nodes for budget in drafter.budgets]
    assert sorted(found) == [0, 0, 5]
    proposer.propose(requests, 100, [])
    assert max(budget.max_nodes for budget in drafter.budgets[3:]) == 6


def test_node_budgets_of_prefetched_drafts() -> None:
    recipe = Recipe("noting", Noting(), RatioVerifier(), 6, False, False, DensePlans())
    proposer = proposer_of(recipe, cast(Faults, None))
    seeded, asking, other = (make_request([9], max_tokens=50) for _ in range(3))
    seeded.history_only, asking.max_draft = True, 1
    assert proposer.node_budgets([seeded, asking, other], 100) == [2, 1, 6]
    assert proposer.node_budgets([seeded, asking, other], 11) == [
        2,
        1,
        4,
    ]  # nine rows for two, next to the two of its own
    assert proposer.node_budgets([other, other], 7) == [3, 3]


def test_drafting_ahead_ends_with_the_target_except_for_seeded_requests() -> None:
    drafter = Noting()
    recipe = Recipe("noting", drafter, RatioVerifier(), 6, True, False, DensePlans())
    proposer = proposer_of(recipe, cast(Faults, None), max_length=12)
    requests = [make_request([9] * 4, max_tokens=room) for room in (50, 50, 3)]
    requests[1].history_only = True
    pending = Draft(TokenTree([7, 7]), PointMass())
    for _ in range(2):
        shadows = [AssumedContext(request, pending) for request in requests]
        drafts = proposer.ahead(shadows, [9, 5, 9], lambda: True)
        assert [len(each) for each in drafts if isinstance(each, Draft)] == [6, 5, 0]  # the cache, the nodes, the text
    rules = [budget.stop_rule for budget in drafter.budgets]
    for request, first, second in zip(requests, rules[:3], rules[3:], strict=True):
        assert isinstance(first, OverlapRule)
        assert isinstance(second, OverlapRule)
        assert first.past is second.past is request.ahead_rule
        assert first.stopped() is not request.history_only


class Certain(Constraint):
    """Sevens are all that may follow."""

    def allowed(self, path: Sequence[int]) -> None:
        raise AssertionError("unexpected call")

    def possible(self, path: Sequence[int]) -> bool:
        return all(token == 7 for token in path)

    def forced(self, limit: int) -> list[int]:
        return [7] * limit

    def append(self, tokens: Sequence[int]) -> None:
        pass

    def copy(self) -> Certain:
        return self


class Comparing(RatioVerifier):
    needs = Needs(evidence=GreedyLaws)


class Drawing(Stub):
    laws = (Sampled,)


class Seeing(Stub):
    needs = Needs(hidden_layers=HiddenLayers((1,)))


@pytest.mark.parametrize(
    ("drafter", "verifier", "temperature", "forced"),
    [
        (Stub, None, 0.0, True),
        (Stub, RatioVerifier, 1.0, True),
        (Seeing, None, 0.0, False),  # it does not see tokens that it did not draft
        (Drawing, None, 1.0, True),  # the rule is chosen for each draft
        (Drawing, RatioVerifier, 1.0, False),
        (Drawing, RatioVerifier, 0.0, True),
        (Stub, Comparing, 0.0, False),  # a forced draft carries no distribution
        (Stub, Comparing, 1.0, True),
    ],
)
def test_what_a_constraint_forces_is_drafted_where_the_rule_takes_it(
    drafter: type[Stub], verifier: type[RatioVerifier] | None, temperature: float, forced: bool
) -> None:
    recipe = Recipe("forced", drafter(), verifier and verifier(), 3, False, False, DensePlans())
    proposer = proposer_of(recipe, cast(Faults, None), max_length=12)
    requests = [make_request([9] * 4, max_tokens=room, temperature=temperature) for room in (6, 50, 50, 50, 50)]
    requests[2].max_draft, requests[3].history_only = 0, True
    for request in requests:
        request.laws.constraint = Certain()
    drafts = proposer.propose(requests, 15, [])
    # limited by the text, then by the cache, then by the step
    assert [len(draft) for draft in drafts] == ([5, 8, 0, 0, 2] if forced else [0] * 5)
    assert all(draft.by_engine and set(draft.tree.tokens) == {7} for draft in drafts if len(draft))
    assert all(draft.sources == ("grammar",) * len(draft) for draft in drafts)


TREE = Draft(
    TokenTree([7, 3, 7, 7], [-1, -1, 0, 1]), PointMass(), confidence=(0.9, 0.8, 0.7, 0.6), sources=("a", "b", "c", "d")
)
CUT = Draft(TokenTree([7, 7], [-1, 0]), PointMass(), confidence=(0.9, 0.7), sources=("a", "c"))
WHOLE = Draft(TokenTree([7, 7]), PointMass(), moved_bytes=5)
DRAWN = Draft(TokenTree([3]), Sampled(torch.full((1, 100), 0.01), (0,)))


@pytest.mark.parametrize(
    ("draft", "cut"),
    [(TREE, CUT), (WHOLE, WHOLE), (Draft(TokenTree([3, 7]), PointMass()), NO_DRAFT), (DRAWN, DRAWN)],
    ids=["a tree", "whole", "nothing left", "drawn"],
)
def test_what_the_constraint_forbids_is_not_read_but_where_it_was_drawn(draft: Draft, cut: Draft) -> None:
    class Given(Stub):
        laws = (PointMass, Sampled)

        def draft(self, context: Context, budget: Budget) -> Draft:
            return draft

    recipe = Recipe("given", Given(), None, 4, False, False, DensePlans())
    request = make_request([9], max_tokens=50, temperature=1.0)
    request.laws.constraint = Certain()
    (found,) = proposer_of(recipe, cast(Faults, None)).propose([request], 4, [])
    if not len(cut):
        assert found.by_engine  # and the forced tokens instead
        return
    assert (found.tree, found.law, found.confidence) == (cut.tree, cut.law, cut.confidence)
    assert (found.sources, found.moved_bytes) == (cut.sources, cut.moved_bytes)
