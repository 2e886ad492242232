"""Children of a node: how many, which, and with which numbers they are drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.draft import HubPair, Sampled, Tabulated, TopThenSampled, WithoutReplacement
from foretoken.core.randomness import Streams
from foretoken.core.siblings import draw_siblings, hub_of

Q = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


class Script(Streams):
    """Given draws, and a record of the weights and purposes of the calls."""

    def __init__(self, *answers: int) -> None:
        super().__init__(0)
        self.answers = list(answers)
        self.asked: list[list[float]] = []

    def categorical(self, purpose: str, p_V: Tensor) -> int:
        assert purpose == "draft"
        self.asked.append(p_V.tolist())
        return self.answers.pop(0)

    def distinct(self, purpose: str, q_V: Tensor, count: int) -> list[int]:
        assert purpose == "draft"
        self.asked.append(q_V.tolist())
        return [self.answers.pop(0) for _ in range(count)]


def without(*tokens: int) -> list[float]:
    return [0.0 if token in tokens else share for token, share in enumerate(Q.tolist())]


def test_free_draws_may_repeat_and_exceed_the_tokens() -> None:
    rng = Script(1, 1, 3, 1, 0, 4)
    assert draw_siblings(Sampled, Q, 6, rng) == [1, 1, 3, 1, 0, 4]
    assert rng.asked == [without()] * 6


@pytest.mark.parametrize("kind", [Sampled, WithoutReplacement, TopThenSampled, HubPair])
def test_an_only_child_is_a_draw_from_q(kind: type[Tabulated]) -> None:
    rng = Script(3)
    assert draw_siblings(kind, Q, 1, rng) == [3]
    assert rng.asked == [without()]


@pytest.mark.parametrize("kind", [WithoutReplacement, TopThenSampled, HubPair])
def test_where_q_has_one_token_there_is_one_child(kind: type[Tabulated]) -> None:
    assert draw_siblings(kind, torch.tensor([0.0, 1.0]), 2, Script(1)) == [1]


def test_successive_draws_are_as_many_as_q_has_tokens() -> None:
    assert draw_siblings(WithoutReplacement, Q, 9, Script(3, 0, 1, 4)) == [3, 0, 1, 4]
    assert draw_siblings(WithoutReplacement, Q, 2, Script(3, 0)) == [3, 0]


def test_favourites_come_first_and_the_youngest_is_drawn_without_them() -> None:
    rng = Script(0)
    assert draw_siblings(TopThenSampled, Q, 3, rng) == [1, 3, 0]
    assert rng.asked == [without(1, 3)]


def test_a_hub_pair_has_the_hub_in_either_place() -> None:
    assert draw_siblings(HubPair, Q, 2, Script(3)) == [3, 1]
    rng = Script(1, 4)
    assert draw_siblings(HubPair, Q, 2, rng) == [1, 4]
    assert rng.asked == [without(), without(1)]


def test_the_hub_is_the_first_of_equals() -> None:
    assert hub_of(torch.tensor([0.1, 0.3, 0.3, 0.3])) == 1
    assert hub_of(torch.tensor([0.5, 0.5])) == 0
    assert hub_of(Q) == 1


def test_of_equal_columns_the_hub_is_that_of_the_smallest_token() -> None:
    """Columns may be in any order; drafter and verifier must mean the same one."""
    q_C, columns = torch.tensor([0.4, 0.4, 0.2]), Columns(torch.tensor([9, 2, 5]), 10)
    assert hub_of(q_C, columns) == 1
    assert draw_siblings(HubPair, q_C, 2, Script(0), columns) == [9, 2]
    assert draw_siblings(HubPair, q_C, 2, Script(1, 2), columns) == [2, 5]
