"""The shape of a draft: chains, depths, children, ancestors."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.tree import EMPTY_TREE, ROOT, TokenTree

#  root ── 0 ── 2 ── 3
#       └─ 1 ── 4
TREE = TokenTree([10, 11, 12, 13, 14], [-1, -1, 0, 2, 1])


def test_a_tree_without_parents_is_a_chain() -> None:
    chain = TokenTree([7, 8, 9])
    assert chain.parents == (-1, 0, 1)
    assert chain.is_chain
    assert chain.depths == (1, 2, 3)
    assert chain.children == {-1: (0,), 0: (1,), 1: (2,)}
    of_tensors = TokenTree(torch.tensor([7, 8, 9]), torch.tensor([-1, 0, 1]))
    assert chain == of_tensors
    assert {type(each) for each in (*of_tensors.tokens, *of_tensors.parents)} == {int}
    assert TokenTree([7, 8], [-1, 0]).is_chain
    assert not TokenTree([7, 8], [-1, -1]).is_chain
    assert TokenTree([7]).path_to(0) == [0]


def test_depths_children_and_paths() -> None:
    assert not TREE.is_chain
    assert len(TREE) == 5
    assert TREE.depths == (1, 1, 2, 3, 2)
    assert TREE.children == {-1: (0, 1), 0: (2,), 1: (4,), 2: (3,)}
    assert TREE.path_to(3) == [0, 2, 3]
    assert TREE.path_to(4) == [1, 4]
    assert TREE.path_to(ROOT) == []


def test_a_row_may_attend_to_its_ancestors_only() -> None:
    assert TREE.ancestors_NN.tolist() == [[j in TREE.path_to(i) for j in range(5)] for i in range(5)]
    assert TREE.ancestors_NN.dtype == torch.bool
    assert EMPTY_TREE.ancestors_NN.shape == (0, 0)
    assert EMPTY_TREE.ancestors_NN.dtype == torch.bool
    assert [list(row) for row in TREE.ancestor_rows] == TREE.ancestors_NN.int().tolist()


def test_tensor_views() -> None:
    assert TREE.tokens_N.tolist() == list(TREE.tokens)
    for tree in (TREE, EMPTY_TREE):
        assert tree.tokens_N.dtype == torch.int64


def test_equal_trees_are_equal_and_hash_alike() -> None:
    same = TokenTree([10, 11, 12, 13, 14], [-1, -1, 0, 2, 1])
    assert same == TREE
    assert hash(same) == hash(TREE)
    assert len({hash(TokenTree([token])) for token in range(8)}) > 1
    assert TokenTree([10, 11], [-1, -1]) != TokenTree([10, 11], [-1, 0])
    assert TokenTree([10]) != TokenTree([11])
    assert TREE.tokens != TREE
    assert repr(TokenTree([1, 2])) == "TokenTree(tokens=(1, 2), parents=(-1, 0))"


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [-1], "a tree of 2 tokens cannot have 1 parents"),
        ([1], [0], "node 0 has parent 0"),
        ([1, 2], [-1, 1], "node 1 has parent 1"),
        ([1, 2], [-2, 0], "node 0 has parent -2"),
    ],
)
def test_invalid_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, parents)
