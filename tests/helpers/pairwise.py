"""Choose few combinations out of many, such that every pair of values of two factors still occurs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")
Values = tuple[Hashable, ...]


def pairwise(rows: Sequence[Row], factors: Callable[[Row], Values], once: Callable[[Row], Values]) -> list[Row]:
    """Choose rows that cover all that the given rows cover, in their order; the same rows at every call.

    Args:
        rows: all combinations that are possible.
        factors: values of a row, one a factor; every pair of values of two factors that some row has is covered.
        once: further values of a row, each of which is covered.
    """
    covers = [_covered(factors(row), once(row)) for row in rows]
    left = set().union(*covers)
    chosen = set()
    for gain in range(max(map(len, covers), default=0), 0, -1):  # first the rows that cover most
        for index, covered in enumerate(covers):
            if len(covered & left) >= gain:
                chosen.add(index)
                left -= covered
    return [row for index, row in enumerate(rows) if index in chosen]


def in_pairs(rows: Sequence[Row], factors: Callable[[Row], Values], once: Callable[[Row], Values]) -> list[Any]:
    """Parameters for ``parametrize``: all rows, of which only the pairwise ones run without ``--all-variants``."""
    chosen = {id(row) for row in pairwise(rows, factors, once)}
    return [pytest.param(row, marks=() if id(row) in chosen else pytest.mark.full_product) for row in rows]


def _covered(factors: Values, once: Values) -> set[Hashable]:
    return {*combinations(enumerate(factors), 2), *enumerate(once)}
