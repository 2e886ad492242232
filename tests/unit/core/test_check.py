"""A draft's distribution is looked at before it is believed; each mistake is refused with its reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foretoken.core.check import check
from foretoken.core.columns import Columns
from foretoken.core.draft import (
    Coupled,
    HubPair,
    Law,
    PointMass,
    Sampled,
    Tabulated,
    TopThenSampled,
    WithoutReplacement,
)
from foretoken.core.randomness import Streams
from foretoken.core.siblings import draw_siblings, hub_of
from foretoken.core.tree import EMPTY_TREE, TokenTree

V = 12
KINDS: list[type[Tabulated]] = [Sampled, WithoutReplacement, TopThenSampled, HubPair]


def q_rows(count: int = 3, seed: int = 0) -> Tensor:
    return torch.softmax(torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * 2, -1)


CHAIN = TokenTree((3, 4, 5))


def with_entry(row: int, token: int, value: float) -> Tensor:
    q_KV = q_rows()
    q_KV[row, token] = value
    return q_KV


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_drafters_draw_passes(kind: type[Tabulated]) -> None:
    for seed in range(60):
        q_KV = q_rows(2, seed)
        q_KV[:, seed % 3 :: 3] = 0.0
        q_KV /= q_KV.sum(-1, keepdim=True)
        streams = Streams(seed)
        first = draw_siblings(kind, q_KV[0], 2 if kind is HubPair else 3, streams)
        second = draw_siblings(kind, q_KV[1], 2, streams)
        parents = [-1] * len(first) + [0] * len(second)
        row_of = (0,) * len(first) + (1,) * len(second)
        check(kind(q_KV, row_of), TokenTree([*first, *second], parents), V)
        # the same draft with a token that no draw gives
        with pytest.raises(ValueError, match="which has q = 0"):
            check(kind(q_KV, row_of), TokenTree([*first[:-1], seed % 3, *second], parents), V)


@pytest.mark.parametrize("kind", KINDS)
def test_an_only_child_may_be_any_token_of_its_row(kind: type[Tabulated]) -> None:
    """Two siblings of a hub pair have to name the most probable token; of one, no kind asks that."""
    rare = q_rows().argmin(-1).tolist()
    check(kind(q_rows(), (0, 1, 2)), TokenTree(rare), V)


@pytest.mark.parametrize("law", [PointMass(), Coupled()])
def test_point_masses_have_nothing_to_check(law: Law) -> None:
    """It needs no table, while every other kind must have one."""
    check(law, CHAIN, V)
    with pytest.raises(ValueError, match="0 rows"):
        check(Sampled(q_rows(0), (0, 0, 0)), CHAIN, V)


def test_an_empty_draft_is_never_looked_at() -> None:
    check(Sampled(torch.full((1, 3), math.nan), ()), EMPTY_TREE, V)
    with pytest.raises(ValueError, match="NaN"):
        check(Sampled(torch.full((1, V), math.nan), (0, 0, 0)), CHAIN, V)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (Sampled(q_rows()[0], (0, 1, 2)), r"shape \[12\]"),
        (Sampled(q_rows()[:, :11], (0, 1, 2)), r"shape \[3, 11\], not \[rows, 12\]"),
        (Sampled(q_rows()[None], (0, 1, 2)), "shape"),
        (Sampled(q_rows().bfloat16(), (0, 1, 2)), "q is bfloat16"),
        (Sampled(q_rows(), (0, 1)), "2 entries for 3 nodes"),
        (Sampled(q_rows(), (0, 1, 2, 2)), "4 entries for 3 nodes"),
        (Sampled(q_rows(), (0, 1, 3)), "0 to 3, but q has 3 rows"),
        (Sampled(q_rows(), (-1, 1, 2)), "-1 to 2"),
        (Sampled(q_rows(0), (0, 0, 0)), "q has 0 rows"),
        (Sampled(q_rows() * 1.01, (0, 1, 2)), "row 0 of q sums to 1.01"),
        (Sampled(q_rows().log(), (0, 1, 2)), "negative entry"),
        (Sampled(torch.cat([q_rows(2), torch.zeros(1, V)]), (0, 1, 2)), "row 2 of q sums to 0"),
        (Sampled(with_entry(1, 7, math.nan), (0, 1, 2)), "row 1 of q has entries that are NaN"),
        (Sampled(with_entry(1, 7, math.inf), (0, 1, 2)), "row 1 of q has entries that are NaN or infinite"),
        (Sampled(with_entry(1, 7, -math.inf), (0, 1, 2)), "row 1 of q has entries that are NaN or infinite"),
        (Sampled(with_entry(2, 7, -1e-4), (0, 1, 2)), "negative entry -0.0001"),
    ],
)
def test_a_table_that_is_no_distribution_is_refused(law: Law, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(law, CHAIN, V)


def test_a_token_that_q_forbids_is_refused() -> None:
    q_KV = q_rows()
    q_KV[1, 4] = 0.0
    q_KV[1] /= q_KV[1].sum()
    with pytest.raises(ValueError, match="node 1 carries token 4, which has q = 0"):
        check(Sampled(q_KV, (0, 1, 2)), CHAIN, V)


def test_a_hair_of_rounding_is_no_mistake() -> None:
    check(Sampled(q_rows() * (1 + 1e-5), (0, 1, 2)), CHAIN, V)
    check(Sampled(q_rows().double(), (0, 1, 2)), CHAIN, V)
    with pytest.raises(ValueError, match="sums to"):
        check(Sampled(q_rows() * (1 + 3e-3), (0, 1, 2)), CHAIN, V)


def bush(*tokens: int) -> TokenTree:
    return TokenTree(tokens, (-1,) * len(tokens))


RANKED = q_rows()[0].argsort(descending=True).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_of_different_rows_are_refused(kind: type[Tabulated]) -> None:
    with pytest.raises(ValueError, match=r"different rows of q: \[0, 1\]"):
        check(kind(q_rows(), (0, 1)), bush(3, 4), V)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_repeated_siblings_are_refused_where_none_can_repeat(kind: type[Tabulated]) -> None:
    with pytest.raises(ValueError, match=f"repeat a token .*which {kind.__name__} never does"):
        check(kind(q_rows(), (0, 0)), bush(RANKED[0], RANKED[0]), V)
    check(Sampled(q_rows(), (0, 0)), bush(3, 3), V)


def test_hub_pairs_are_pairs_and_have_the_hub() -> None:
    with pytest.raises(ValueError, match="3 children, but HubPair has pairs only"):
        check(HubPair(q_rows(), (0, 0, 0)), bush(*RANKED[:3]), V)
    with pytest.raises(ValueError, match="lacks the most probable token"):
        check(HubPair(q_rows(), (0, 0)), bush(RANKED[1], RANKED[2]), V)
    check(HubPair(q_rows(), (0, 0)), bush(RANKED[4], RANKED[0]), V)
    check(HubPair(q_rows(), (0, 0)), bush(RANKED[0], RANKED[4]), V)
    even = torch.full((1, V), 1 / V)
    assert hub_of(even[0]) == 0
    with pytest.raises(ValueError, match="first of equals"):  # another of the equals: the verifier means the first
        check(HubPair(even, (0, 0)), bush(1, 2), V)
    check(HubPair(even, (0, 0)), bush(2, 0), V)


def test_greedy_drafts_begin_with_their_favourites() -> None:
    check(TopThenSampled(q_rows(), (0, 0, 0)), bush(RANKED[1], RANKED[0], RANKED[5]), V)
    with pytest.raises(ValueError, match="do not begin with the most probable tokens"):
        check(TopThenSampled(q_rows(), (0, 0, 0)), bush(RANKED[0], RANKED[3], RANKED[1]), V)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_from_some_columns_pass(kind: type[Tabulated]) -> None:
    for seed in range(40):
        columns = Columns(torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:7].sort().values, V)
        q_KC = torch.softmax(torch.randn(1, 7, generator=torch.Generator().manual_seed(seed)).mul_(2).round_(), -1)
        tokens = draw_siblings(kind, q_KC[0], 2, Streams(seed), columns)
        if kind in (Sampled, HubPair):  # the others leave ties and noise to the order of columns
            assert tokens == draw_siblings(kind, columns.spread(q_KC[0]), 2, Streams(seed))
        tree, row_of = TokenTree(tokens, [-1] * len(tokens)), (0,) * len(tokens)
        check(kind(q_KC, row_of, columns), tree, V)
        other = next(token for token in range(V) if token not in columns)
        with pytest.raises(ValueError, match=f"token {other}, which q has no column for"):
            check(kind(q_KC, row_of, columns), TokenTree([*tokens[:-1], other], tree.parents), V)
        with pytest.raises(ValueError, match=r"shape \[1, 7\], not \[rows, 12\]"):
            check(kind(q_KC, row_of), tree, V)
        with pytest.raises(ValueError, match="vocabulary of 12, not of 13"):
            check(kind(q_KC, row_of, columns), tree, V + 1)


def test_of_equals_the_hub_is_the_token_with_the_smallest_id() -> None:
    columns = Columns(torch.tensor([9, 4, 2]), V)
    q_C = torch.tensor([0.4, 0.4, 0.2])
    assert columns.ids_C[hub_of(q_C, columns)] == hub_of(columns.spread(q_C)) == 4


@pytest.mark.parametrize("ids", [[], [3, 3], [-1, 5], [0, V]], ids=str)
def test_columns_that_are_no_tokens_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="columns stand for"):
        Columns(torch.tensor(ids, dtype=torch.int64), V)
