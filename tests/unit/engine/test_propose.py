"""What the engine allows each draft: nodes, depth, and the room that a request has left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from foretoken.core.draft import Draft, PointMass
from foretoken.core.protocols import Budget, Context
from foretoken.core.tree import TokenTree
from foretoken.engine.controller import Controller
from foretoken.engine.faults import Faults
from foretoken.engine.own_past import OwnPastRule
from foretoken.engine.propose import Proposer
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request
from foretoken.engine.unseen import Unseen
from foretoken.models.dense import DensePlans
from foretoken.testing import Stub
from foretoken.verifiers.ratio import RatioVerifier
from helpers.requests import make_request


class Noting(Stub):
    """Keeps the budgets that it was given."""

    def __init__(self) -> None:
        self.budgets: list[Budget] = []

    def draft(self, context: Context, budget: Budget) -> Draft:
        self.budgets.append(budget)
        return Draft(TokenTree(range(min(budget.max_nodes, budget.max_depth))), PointMass())


def budgets(
    requests: Sequence[Request], *, num_nodes: int = 6, spare: int = 100, max_length: int = 1000, adaptive: bool = False
) -> list[Budget]:
    drafter = Noting()
    recipe = Recipe("noting", drafter, RatioVerifier(), num_nodes, adaptive, False, DensePlans())
    faults = cast(Faults, None)  # nobody fails
    unseen = Unseen(drafter, faults)
    proposer = Proposer(recipe, 100, max_length, Controller(), faults, unseen, own_nodes=2, own_rows=2, node_cost=0.1)
    for request in requests:
        request.own_past = recipe.own_past(request.params)
    failed: list[Any] = []
    drafts = proposer.propose(requests, spare, failed)
    assert not failed
    assert len(drafts) == len(requests)
    if drafter.budgets:
        return drafter.budgets
    assert not any(map(len, drafts))  # nobody may draft, so nobody is asked
    return [Budget(0, 0)] * len(requests)


@pytest.mark.parametrize(
    ("room", "depth", "nodes"),
    [(1, 0, 0), (2, 1, 6), (4, 3, 6), (6, 5, 6), (7, 6, 6), (8, 6, 6), (50, 6, 6)],
)
def test_a_draft_is_one_shorter_than_what_may_still_be_emitted(room: int, depth: int, nodes: int) -> None:
    (budget,) = budgets([make_request([9, 9], max_tokens=room)])
    assert (budget.max_depth, budget.max_nodes) == (depth, nodes)


def test_a_tree_finds_room_in_the_cache() -> None:
    (budget,) = budgets([make_request([9] * 7, max_tokens=50)], max_length=10)
    assert budget.max_nodes == 3


def test_spare_rows_are_shared_evenly() -> None:
    requests = [make_request([9], max_tokens=50) for _ in range(3)]
    assert [each.max_nodes for each in budgets(requests, spare=11)] == [3, 3, 3]
    assert [each.max_nodes for each in budgets(requests, spare=2)] == [0, 0, 0]


def test_a_seeded_request_has_rows_of_its_own_and_a_rule_of_its_own() -> None:
    seeded = make_request([9], max_tokens=50, temperature=1.0, seed=1)
    other = make_request([9], max_tokens=50, temperature=1.0)
    first, second = budgets([seeded, other], spare=5, adaptive=True)
    assert (first.max_nodes, first.own_past, type(first.stop_rule)) == (2, True, OwnPastRule)
    assert (second.max_nodes, second.own_past, second.stop_rule) == (3, False, None)
    assert seeded.own_rule is first.stop_rule
