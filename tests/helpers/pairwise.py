"""Choose few combinations out of many, such that every value, or every pair of values of two factors, still occurs.

Without ``--all-variants`` a test runs with few of its parameters, in one of two ways: ``in_pairs`` chooses rows of a
list by factors that the test names, and the marker ``covering`` chooses among the combinations of a test's parameters.
"""

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


def beyond_covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of the tests that are marked ``covering(strength)`` those that cover no further values.

    The chosen ones have every value of each parameter (strength 1), or every pair of values of two parameters (2).
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for rows in tests.values():
        mark = rows[0].get_closest_marker("covering")
        assert mark is not None
        chosen = pairwise(rows, _values, _nothing) if mark.args == (2,) else pairwise(rows, _nothing, _values)
        left_out += [row for row in rows if row not in chosen]
    return left_out


def _nothing(row: object) -> Values:
    return ()


def _values(item: pytest.Item) -> Values:
    """Which objects a test's parameters are, in the order of their names."""
    parameters = item.callspec.params  # type: ignore[attr-defined]  # of a parametrised function
    return tuple(id(parameters[name]) for name in sorted(parameters))


def _covered(factors: Values, once: Values) -> set[Hashable]:
    return {*combinations(enumerate(factors), 2), *enumerate(once)}
