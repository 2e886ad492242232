"""Marks alone: which lengths they reach, and which of them are forgotten."""

from __future__ import annotations

import torch

from foretoken.forward.ssm.marks import Mark, Marks


def mark(length: int, absorbed_L: list[int] | None = None) -> Mark:
    absorbed_L = [length] if absorbed_L is None else absorbed_L
    return Mark(length, min(absorbed_L), absorbed_L, *(torch.zeros(1) for _ in range(4)))


def test_a_mark_reaches_no_further_back_than_what_any_mixer_has_absorbed() -> None:
    found = mark(9, [4, 7])
    assert [length for length in range(12) if found.reaches(length)] == [7, 8, 9]


def test_the_mark_that_was_used_least_recently_is_forgotten_first() -> None:
    marks, size = Marks(), mark(1).num_bytes
    for length in (1, 2, 3):
        marks.add(0, mark(length), 3 * size)
    assert marks.to(0, 1) is not None
    assert marks.to(0, 2) is not None
    marks.add(0, mark(4), 3 * size)  # 3 was made after 1 and 2, but these have been gone back to since
    assert [length for length in range(6) if marks.is_at(0, length)] == [1, 2, 4]
    marks.add(0, mark(5), 2 * size)
    assert [length for length in range(6) if marks.is_at(0, length)] == [4, 5]
