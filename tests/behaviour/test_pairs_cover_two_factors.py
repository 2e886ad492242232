"""The combinations that run by default cover every pair of values of two factors, and are the same at every call."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from helpers.pairwise import beyond_covering, in_pairs, pairwise

ROWS = [row for row in product("abcde", "xyz", range(4), (True, False)) if row[:2] != ("a", "x")]


def factors(row):
    return row


def none(row):
    return ()


def pairs_of(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_pair_of_two_factors_is_covered_by_few_rows():
    chosen = pairwise(ROWS, factors, none)
    assert pairs_of(chosen) == pairs_of(ROWS)
    assert len(chosen) < len(ROWS) // 3


def test_the_choice_is_in_order_and_repeatable():
    chosen = pairwise(ROWS, factors, none)
    assert chosen == pairwise(ROWS, factors, none)
    assert chosen == [row for row in ROWS if row in chosen]


def test_values_wanted_once_are_covered():
    chosen = pairwise(ROWS, lambda row: row[1:3], lambda row: (row[0], row[3]))
    assert {row[0] for row in chosen} == set("abcde")
    assert {row[3] for row in chosen} == {True, False}


def test_the_other_rows_are_marked():
    parameters = in_pairs(ROWS, factors, none)
    assert [each.values[0] for each in parameters] == ROWS
    assert [each.values[0] for each in parameters if not each.marks] == pairwise(ROWS, factors, none)


def test_no_rows_are_no_choice():
    assert pairwise([], factors, none) == []


@pytest.mark.parametrize(("strength", "count"), [(1, 5), (2, 20)])
def test_a_marked_test_keeps_every_value_or_every_pair(strength, count):
    def item(name, row, *marks):
        given = SimpleNamespace(params=dict(zip("dcba", row, strict=True)))
        return SimpleNamespace(nodeid=f"{name}[{row}]", callspec=given, get_closest_marker=dict(marks).get)

    mark = ("covering", SimpleNamespace(args=(strength,)))
    marked, others = [[item(name, row, *marks) for row in ROWS] for name, marks in (("x", [mark]), ("y", []))]
    left_out = beyond_covering([*others, *marked])
    kept = [row for row, each in zip(ROWS, marked, strict=True) if each not in left_out]
    assert not any(each in left_out for each in others)
    assert count <= len(kept) < len(ROWS) // (4 - strength)
    assert {value for row in kept for value in enumerate(row)} == {value for row in ROWS for value in enumerate(row)}
    assert (pairs_of(kept) == pairs_of(ROWS)) is (strength == 2)
