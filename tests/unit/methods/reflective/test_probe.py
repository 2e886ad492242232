"""The layout of a probe: the tokens after a draft, and the row that judges each token."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.tree import TokenTree
from foretoken.methods.reflective.probe import paths_of, reflected, with_copies

PROMPT, PREFIX = (90, 91, 92), (7, 8)


def rows(count: int) -> torch.Tensor:
    """Row k is full of k."""
    return torch.arange(float(count))[:, None].expand(count, 4)


def of(found: dict[int, torch.Tensor]) -> dict[int, float]:
    return {row: float(value[0]) for row, value in found.items()}


def test_a_chain_goes_on_with_prompt_prefix_and_copy():
    probed = with_copies(TokenTree((10, 11, 12)), PROMPT, PREFIX, bonus=False)
    assert probed.is_chain
    assert probed.tokens == (10, 11, 12, *PROMPT, *PREFIX, 10, 11)
    assert with_copies(TokenTree((10, 11)), (), (8,), bonus=True).tokens == (10, 11, 8, 10, 11)


@pytest.mark.parametrize("prefix", [0, 1, 8])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("bonus", [False, True])
def test_every_drafted_token_is_judged_by_the_row_before_its_copy(prefix, count, bonus):
    tree = TokenTree(range(10, 10 + count))
    probed = with_copies(tree, PROMPT, range(prefix), bonus=bonus)
    num_probes = len(probed) - count
    found = of(reflected(tree, rows(num_probes), len(PROMPT), bonus=bonus))
    assert set(found) == set(range(count + bonus))
    for row, probe in found.items():
        # the token after the row that judges d_(row + 1) is that token's copy, or there is none after it
        behind = count + int(probe) + 1
        assert (probed.tokens[behind] == tree.tokens[row]) if behind < len(probed) else row == count - 1 + bonus
        before = probed.tokens[count + int(probe)]
        assert before == (tree.tokens[row - 1] if row else [*PROMPT, *range(prefix)][-1])


def test_every_path_of_a_tree_has_a_copy_of_its_own_that_sees_no_other():
    tree = TokenTree((10, 11, 12, 13), (-1, -1, 0, 0))  # leaves 1, 2 and 3
    assert paths_of(tree) == [[1], [0, 2], [0, 3]]
    probed = with_copies(tree, (90,), (7,), bonus=False)
    assert probed.tokens[4:] == (90, 7, 90, 7, 10, 90, 7, 10)
    for node in range(4, len(probed)):
        seen = [probed.tokens[each] for each in probed.path_to(node)]
        assert (
            seen
            == [[11, 90, 7], [10, 12, 90, 7, 10], [10, 13, 90, 7, 10]][0 if node < 6 else 1 if node < 9 else 2][
                : len(seen)
            ]
        )
    # row 0 is judged by all three copies; row 1, after node 0, by those of its two paths
    assert of(reflected(tree, rows(8), 1, bonus=False)) == pytest.approx({0: (1 + 3 + 6) / 3, 1: (4 + 7) / 2})


def test_a_tree_of_one_path_is_the_chain():
    chain, tree = TokenTree((10, 11)), TokenTree((10, 11), (-1, 0))
    assert with_copies(chain, PROMPT, PREFIX, bonus=False) == with_copies(tree, PROMPT, PREFIX, bonus=False)


def test_rows_that_are_no_probe_of_the_draft_are_refused():
    tree = TokenTree((10, 11, 12), (-1, -1, -1))
    for count in (0, 7, 8):
        with pytest.raises(ValueError, match="probe rows"):
            reflected(tree, rows(count), 3, bonus=False)
