from __future__ import annotations

import pytest
import torch

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch

CPU = torch.device("cpu")
#   root ─┬─ 0 ── 2
#         └─ 1
FORKED = TokenTree((20, 21, 22), (-1, -1, 0))


def test_rows_of_all_requests_stand_end_to_end() -> None:
    batch = PackedBatch()
    batch.add_chunk(0, 0, [1, 2, 3, 4], wanted=0)
    batch.add_tree(1, 57, 9, TokenTree(()))
    batch.add_tree(2, 9, 19, FORKED)
    assert batch.ids_1T(CPU).tolist() == [[1, 2, 3, 4, 9, 19, 20, 21, 22]]
    assert batch.positions_1T(CPU).tolist() == [[0, 1, 2, 3, 57, 9, 10, 10, 11]]
    assert [(each.slot, each.prefix, each.start, each.num_rows) for each in batch.segments] == [
        (0, 0, 0, 4),
        (1, 57, 4, 1),
        (2, 9, 5, 4),
    ]
    wanted = batch.wanted_rows(CPU)
    assert wanted is not None
    assert wanted.tolist() == [4, 5, 6, 7, 8]
    assert len(batch) == 9


def test_all_rows_wanted_needs_no_index() -> None:
    batch = PackedBatch()
    batch.add_chunk(0, 3, [1, 2], wanted=2)
    assert batch.wanted_rows(CPU) is None


@pytest.mark.parametrize(("wanted", "rows"), [(0, []), (1, [4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_a_chunk_wants_its_last_rows(wanted: int, rows: list[int]) -> None:
    batch = PackedBatch()
    batch.add_chunk(0, 0, [1, 2], wanted=0)
    batch.add_chunk(1, 5, [3, 4, 5], wanted=wanted)
    assert batch.wanted == rows


def test_a_chain_is_a_chunk() -> None:
    chain, chunk = PackedBatch(), PackedBatch()
    chain.add_tree(3, 8, 5, TokenTree((6, 7), (-1, 0)))
    chunk.add_chunk(3, 8, [5, 6, 7], wanted=3, verification=True)
    assert chain.segments == chunk.segments
    assert (chain.tokens, chain.positions, chain.wanted) == (chunk.tokens, chunk.positions, chunk.wanted)


def test_a_root_with_its_draft_is_distinguished_from_a_prompt() -> None:
    batch = PackedBatch()
    batch.add_chunk(0, 0, [1, 2], wanted=1)
    for slot, tree in enumerate((TokenTree(()), TokenTree((6, 7)), TokenTree((6, 7), (-1, -1))), 1):
        batch.add_tree(slot, 8, 5, tree)
    assert [segment.verification for segment in batch.segments] == [False, True, True, True]


def test_a_tree_row_sees_the_root_and_its_ancestors() -> None:
    batch = PackedBatch()
    batch.add_tree(0, 4, 19, FORKED)
    (segment,) = batch.segments
    assert segment.depths == (0, 1, 1, 2)
    assert segment.seen is not None
    assert segment.seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_a_level_sees_its_ancestors_in_the_tail() -> None:
    """After root, 0 and 1 in the tail: the level of node 2, and of a child of node 1."""
    batch = PackedBatch()
    batch.add_level(0, 4, [22, 23], depths=[2, 2], tail=3, tail_depths=[0, 1, 1], ancestors=[[0, 1], [0, 2]])
    (segment,) = batch.segments
    assert segment.depths == (0, 1, 1, 2, 2)
    assert (segment.prefix, segment.tail, segment.num_rows) == (4, 3, 2)
    assert segment.seen is not None
    assert segment.seen.int().tolist() == [[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert batch.positions == [6, 6]
    assert batch.wanted == [0, 1]
