"""Walking down a draft along the target's choices, and the arithmetic of the residual after a rejection."""

from __future__ import annotations

import math

import torch

from foretoken.core.residual import ratio, residual, residual_without
from foretoken.core.tree import EMPTY_TREE, TokenTree
from foretoken.core.verdict import Verdict, follow


def test_a_chain_stands_as_far_as_it_was_chosen() -> None:
    chain = TokenTree([5, 6, 7])
    assert follow(chain, [9, 6, 7, 8]) == Verdict((), 9)
    assert follow(chain, [5, 9, 7, 8]) == Verdict((0,), 9)
    assert follow(chain, [5, 6, 9, 8]) == Verdict((0, 1), 9)
    assert follow(chain, [5, 6, 7, 8]) == Verdict((0, 1, 2), 8)
    assert follow(EMPTY_TREE, [4]) == Verdict((), 4)


def test_a_tree_is_walked_by_the_child_that_carries_the_choice() -> None:
    #  root ── 0 (5) ── 2 (7)
    #       └─ 1 (6) ── 3 (8) ── 4 (5)
    tree = TokenTree([5, 6, 7, 8, 5], [-1, -1, 0, 1, 3])
    assert follow(tree, [9, 0, 0, 0, 0, 0]) == Verdict((), 9)
    assert follow(tree, [5, 7, 0, 3, 0, 0]) == Verdict((0, 2), 3)
    assert follow(tree, [6, 0, 8, 0, 5, 2]) == Verdict((1, 3, 4), 2)
    assert follow(tree, [6, 0, 7, 0, 5, 2]) == Verdict((1,), 7)


def test_of_equal_siblings_the_first_is_walked() -> None:
    tree = TokenTree([5, 5, 6], [-1, -1, 0])
    assert follow(tree, [5, 6, 0, 1]) == Verdict((0, 2), 1)


def test_a_chain_and_the_same_chain_among_siblings_are_walked_alike() -> None:
    bushy = TokenTree([5, 6, 9], [-1, 0, -1])
    for chosen in ([5, 6, 1], [5, 7, 1], [6, 6, 1]):
        assert follow(bushy, [*chosen, 0]) == follow(TokenTree([5, 6]), chosen)


def test_the_distortion_of_a_verdict_is_a_sum() -> None:
    assert Verdict((), 1).distortion == 0.0
    assert Verdict((0,), 1, distortions=(0.25, 0.5)).distortion == 0.75


def test_ratios_at_the_edges() -> None:
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(0.0, 0.5) == 0.0
    assert ratio(0.5, 0.0) == math.inf
    assert ratio(0.25, 0.5) == 0.5
    assert ratio(0.5, 0.25) == 2.0


def test_the_residual_after_a_rejection_by_hand() -> None:
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.7, 0.1, 0.1, 0.1])
    assert torch.allclose(residual(p_V, q_V), torch.tensor([0.0, 0.2, 0.1, 0.0]))
    assert residual(p_V, p_V) is p_V
    assert p_V.tolist() == torch.tensor([0.5, 0.3, 0.2, 0.0]).tolist()  # as it was
    assert torch.allclose(residual_without(p_V, [0, 2]), torch.tensor([0.0, 0.3, 0.0, 0.0]))
    assert residual_without(p_V, [0, 1, 2]) is p_V
    assert residual_without(p_V, []).tolist() == p_V.tolist()
