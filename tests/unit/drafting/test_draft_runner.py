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


def drafter(tree: str = "chain", model: str = "zoo:draft") -> ModelDrafter:
    recipe = with_config({"method": "draft_model", "model": model, "tree": tree}).recipe
    assert isinstance(recipe.drafter, ModelDrafter)
    return recipe.drafter


def request(tokens: Sequence[int]) -> Request:
    return make_request(tokens, vocab_size=target().vocab_size, max_tokens=100)


def proposed(runner: ModelDrafter, asked: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
    (draft,) = runner.propose([asked], [BUDGET])
    return draft.tree.tokens, draft.confidence


def check_rows(runner: ModelDrafter, asked: Request, kept: int) -> None:
    """Proposals equal those of a drafter without a past, to the last bit of a confidence; only the text after its first
    ``kept`` tokens is read, and each token has the row of its position.
    """
    before = runner.model.layer_rows
    found = proposed(runner, asked)
    drafted = len(found[0]) - 1  # the last node is not read
    assert runner.model.layer_rows - before == (len(asked.tokens) - kept + drafted) * runner.model.num_layers
    state = runner._states[asked.request_id]
    assert state.tokens == asked.tokens
    assert runner.cache.lengths[state.slot] == len(asked.tokens)
    assert found == proposed(drafter(), request(asked.tokens))


@pytest.mark.parametrize("place", [0, 2, 6, 10, 11])
def test_a_changed_token_is_read_again(place: int) -> None:
    """The lengths are equal, so only the tokens differ."""
    runner, asked = drafter(), request(TEXT)
    proposed(runner, asked)
    asked.tokens[place] = 200
    check_rows(runner, asked, place)


@pytest.mark.parametrize("length", [1, 5, 11, 12])
def test_a_text_that_became_shorter_is_read_from_its_last_token(length: int) -> None:
    """That of the whole length is a repeated call: the root's row gives the first distribution."""
    runner, asked = drafter(), request(TEXT)
    proposed(runner, asked)
    del asked.tokens[length:]
    check_rows(runner, asked, length - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_accepted_draft_tokens_are_not_read_again(count: int) -> None:
    """Also without a report of the draft's outcome. The last one is the next root, which is read in any case."""
    runner, asked = drafter(), request(TEXT)
    drafted, _ = proposed(runner, asked)
    asked.tokens += drafted[:count]
    check_rows(runner, asked, len(TEXT) + count - 1)


def test_rows_of_rejected_tokens_are_not_used() -> None:
    runner, asked = drafter(), request(TEXT)
    drafted, _ = proposed(runner, asked)
    asked.tokens += [*drafted[:2], 200]
    check_rows(runner, asked, len(TEXT) + 2)


def test_a_branch_of_a_tree_that_stood_is_not_read_again() -> None:
    runner, asked = drafter("topk"), request(TEXT)
    (draft,) = runner.propose([asked], [Budget(12, 4)])
    deepest = max(range(len(draft)), key=lambda node: draft.tree.depths[node])
    path = [draft.tree.tokens[node] for node in draft.tree.path_to(deepest)]
    asked.tokens += path
    before = runner.model.layer_rows
    runner.propose([asked], [Budget(1, 1)])
    assert runner.model.layer_rows - before == runner.model.num_layers


def test_a_draft_with_states_is_read_again_once_and_marked_from_then_on() -> None:
    """As PEARL drafts: after tokens that are not verified yet, of which some are rejected."""
    runner, asked = drafter(model="zoo:mamba"), request(TEXT)
    read = []
    for turn in range(3):
        drafted, _ = proposed(runner, asked)
        asked.tokens += drafted[:3]
        proposed(runner, asked)
        asked.tokens[-2:] = [200 + turn]
        before = runner.model.layer_rows
        found = proposed(runner, asked)
        read.append((runner.model.layer_rows - before) // runner.model.num_layers - (len(found[0]) - 1))
        assert found == proposed(drafter(model="zoo:mamba"), request(asked.tokens))
    assert read == [len(TEXT) + 2, 1, 1]
