"""Filters of words, against a rule that looks at whole texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from foretoken.core.columns import Columns
from foretoken.core.constraint import Constraint
from foretoken.core.laws import LawMaker
from foretoken.core.tree import TokenTree
from foretoken.core.words import Both, Words
from foretoken.options.sampling import SamplingParams

V = 5
FORBIDDEN = ([3], [0, 1], [1, 2, 0], [0, 0, 0, 4], [4, 4])
ALL_V = torch.ones(V, dtype=torch.bool)


def fits(text: Sequence[int], begin: int) -> bool:
    """Whether no forbidden sequence ends after ``begin``; written the other way round."""
    return not any(
        tuple(text[end - len(word) : end]) == tuple(word)
        for word in FORBIDDEN
        for end in range(max(begin + 1, len(word)), len(text) + 1)
    )


@pytest.mark.parametrize("past", [[], [0], [1, 2], [0, 0, 0], [2, 1, 2, 0, 0, 0]])
def test_every_path_is_judged_as_the_whole_text_is(past):
    words = Words(ALL_V, FORBIDDEN)
    for cut in range(len(past) + 1):  # committed in one piece or two
        split = words.copy()
        split.append(past[:cut])
        split.append(past[cut:])
        for length in range(4):
            for path in itertools.product(range(V), repeat=length):
                text = [*past, *path]
                assert split.possible(path) == fits(text, len(past))
                mask_V = split.allowed(path)
                assert mask_V.tolist() == [fits([*text, token], len(text)) for token in range(V)]
    assert words.forced(3) == []


def test_a_copy_has_a_history_of_its_own():
    words = Words(ALL_V, FORBIDDEN)
    twin = words.copy()
    twin.append([4])
    assert bool(words.allowed([])[4])
    assert not bool(twin.allowed([])[4])


def test_only_allowed_tokens_are_possible():
    words = Words(torch.tensor([True, False, True, False, True]), [[4]])
    assert words.allowed([]).tolist() == [True, False, True, False, False]
    assert words.possible([0, 2])
    assert not words.possible([0, 1])


def test_a_row_allows_the_continuations_of_its_path():
    """Where none of a draft head's columns may follow, its row stays as it is: nothing there will stand."""
    maker = LawMaker(SamplingParams(), [], V, constraint=Words(ALL_V, FORBIDDEN))
    tree = TokenTree([0, 4])
    whole = maker.process(torch.zeros(3, V), tree, (-1, 0, 1))
    assert whole.isinf().tolist() == [[token in banned for token in range(V)] for banned in ([3], [1, 3], [3, 4])]
    some = maker.process(torch.zeros(3, 2), tree, (-1, 0, 1), Columns(torch.tensor([3, 1]), V))
    assert some.isinf().tolist() == [[True, False], [False, False], [True, False]]


class Fixed(Constraint):
    """A grammar of one text."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def allowed(self, path):
        mask_V = torch.zeros(V, dtype=torch.bool)
        if not self.possible(path) or len(path) >= len(self.text):
            return None
        mask_V[self.text[len(path)]] = True
        return mask_V

    def possible(self, path):
        return list(path) == self.text[: len(path)]

    def forced(self, limit):
        return self.text[:limit]

    def append(self, tokens):
        assert self.possible(tokens)
        self.text = self.text[len(tokens) :]

    def copy(self):
        return Fixed(self.text)


def test_both_allow_what_each_does_and_force_no_further():
    both = Both(Fixed([2, 0, 1, 2]), Words(ALL_V, FORBIDDEN))
    assert both.forced(4) == [2, 0]
    assert both.possible([2, 0])
    assert not both.possible([2, 0, 1])
    assert both.allowed([1]) is None
    nothing = both.allowed([2, 0])
    assert nothing is not None
    assert not nothing.any()
    twin = both.copy()
    twin.append([2])
    assert twin.forced(4) == [0]
    assert both.forced(4) == [2, 0]
    twin.append([0])
    nothing = twin.allowed([])  # the words, too, follow the text
    assert nothing is not None
    assert not nothing.any()
    assert Both(Fixed([2]), Unlimited()).allowed([]) is None


class Unlimited(Fixed):
    """Knows of nothing that may follow."""

    def __init__(self) -> None:
        super().__init__([])
