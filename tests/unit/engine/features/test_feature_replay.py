"""What a drafter was shown of a slot's first rows: pieces that follow each other, cut and shared, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.engine.features.feature_replay import FeatureReplay

ROWS_RD = torch.arange(24.0).reshape(8, 3)


def piece(begin: int, end: int, depths: tuple[int, ...] = (1, 4)) -> dict[int, Tensor]:
    return {depth: ROWS_RD[begin:end] + 100 * depth for depth in depths}


def filled() -> FeatureReplay:
    """Slot 2 has six rows, in three pieces."""
    shown = FeatureReplay()
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        shown.add(2, begin, piece(begin, end))
    return shown


def rows_of(shown: FeatureReplay, slot: int, depth: int) -> Tensor:
    """All rows, as long as each piece begins where the last one ends."""
    found = list[Tensor]()
    for begin, each in shown.pieces(slot):
        assert begin == sum(map(len, found))
        found.append(each[depth])
    return torch.cat(found)


def test_pieces_come_in_their_order_and_say_where_they_begin() -> None:
    shown = filled()
    assert [begin for begin, _ in shown.pieces(2)] == [0, 2, 5]
    for depth in (1, 4):
        assert torch.equal(rows_of(shown, 2, depth), ROWS_RD[:6] + 100 * depth)
    assert shown.num_bytes == 2 * 6 * 3 * 4
    shown.drop(2)
    shown.drop(2)
    assert shown.num_bytes == shown.count(2, (1,)) == 0


def test_only_rows_that_follow_are_kept_and_they_are_copies() -> None:
    shown = filled()
    for begin in (5, 7):
        shown.add(2, begin, piece(5, 8))
    shown.add(2, 6, {})
    assert shown.count(2, (1, 4)) == 6
    values_RD = torch.zeros(1, 3)
    shown.add(2, 6, {1: values_RD, 4: values_RD})
    values_RD += 1
    assert rows_of(shown, 2, 4)[6].tolist() == [0.0, 0.0, 0.0]


def test_rows_are_known_at_the_depths_that_all_pieces_have() -> None:
    shown = filled()
    assert [shown.count(2, depths) for depths in ((1, 4), (4,), (1, 2))] == [6, 6, 0]
    shown.add(2, 6, piece(6, 8, (4,)))
    assert [shown.count(2, depths) for depths in ((1, 4), (4,))] == [0, 8]
    assert shown.count(3, (1,)) == 0


def test_another_slot_begins_with_some_of_them() -> None:
    for count in (0, 2, 4, 6):
        shown = filled()
        shown.copy(2, 7, count)
        assert shown.count(7, (1, 4)) == count
        assert not count or torch.equal(rows_of(shown, 7, 1), ROWS_RD[:count] + 100)
        assert shown.num_bytes == 2 * (6 + count) * 3 * 4
    shown.copy(2, 2, 3)  # a slot that is taken over
    assert torch.equal(rows_of(shown, 2, 1), ROWS_RD[:3] + 100)
    shown.add(2, 3, piece(3, 4))
    assert shown.count(2, (1,)) == 4
