"""A draft model's cache keeps the read rows for any later call, and never uses rows of other tokens again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foretoken.core.protocols import Budget
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.engine.request import Request
from helpers.requests import make_request
from helpers.threads import one_thread
from helpers.zoo_llms import target, with_config

__all__ = ["one_thread"]

TEXT = [5, 9, 14, 23, 41, 7, 88, 3, 120, 77, 15, 16]
BUDGET = Budget(4, 4)


def drafter(tree: str = "chain") -> ModelDrafter:
    recipe = with_config({"method": "draft_model", "model": "zoo:draft", "tree": tree}).recipe
    assert isinstance(recipe.drafter, ModelDrafter)
    return recipe.drafter


def request(tokens: Sequence[int]) -> Request:
    return make_request(tokens, vocab_size=target().vocab_size, max_tokens=100)


def proposed(runner: ModelDrafter, asked: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
    (draft,) = runner.propose([asked], [BUDGET])
    return draft.tree.tokens, draft.confidence


def check_rows(runner: ModelDrafter, asked: Request) -> None:
    """Proposals equal those of a drafter without a past, to the last bit of a confidence."""
    assert proposed(runner, asked) == proposed(drafter(), request(asked.tokens))


@pytest.mark.parametrize("place", [2, 6, 10])
def test_a_changed_token_is_read_again(place: int) -> None:
    """The lengths are equal, so only the tokens differ."""
    runner, asked = drafter(), request(TEXT)
    proposed(runner, asked)
    asked.tokens[place] = 200
    check_rows(runner, asked)


@pytest.mark.parametrize("kept", [1, 5, 11])
def test_a_text_that_became_shorter_is_read_from_there(kept: int) -> None:
    runner, asked = drafter(), request(TEXT)
    proposed(runner, asked)
    del asked.tokens[kept:]
    check_rows(runner, asked)


def test_accepted_draft_tokens_are_not_read_again() -> None:
    """Also without a report of the draft's outcome; and rejected rows are not used."""
    runner, asked = drafter(), request(TEXT)
    drafted, _ = proposed(runner, asked)
    before = runner.model.layer_rows
    asked.tokens += drafted
    (again,) = runner.propose([asked], [Budget(1, 1)])
    assert runner.model.layer_rows - before == runner.model.num_layers  # the root alone: the last node was never read
    assert again.tree.tokens == drafter().propose([request(asked.tokens)], [Budget(1, 1)])[0].tree.tokens
    refused = request(TEXT)
    (other,) = runner.propose([refused], [BUDGET])
    refused.tokens += [*other.tree.tokens[:2], 200]
    check_rows(runner, refused)


def test_a_branch_of_a_tree_that_stood_is_not_read_again() -> None:
    runner, asked = drafter("topk"), request(TEXT)
    (draft,) = runner.propose([asked], [Budget(12, 4)])
    deepest = max(range(len(draft)), key=lambda node: draft.tree.depths[node])
    path = [draft.tree.tokens[node] for node in draft.tree.path_to(deepest)]
    asked.tokens += path
    before = runner.model.layer_rows
    runner.propose([asked], [Budget(1, 1)])
    assert runner.model.layer_rows - before == runner.model.num_layers
