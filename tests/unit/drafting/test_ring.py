"""A ring holds what an unbounded cache would hold of the last tokens, whatever became of the tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.drafting.ring import Ring

SIZE, SPARE, HEADS, WIDTH = 7, 4, 2, 3
BYTES = 2 * HEADS * (2 * SIZE + SPARE) * WIDTH * 4


def made(tokens: Sequence[int], begin: int) -> tuple[Tensor, Tensor]:
    """Keys and values that say token and position."""
    rows_T = torch.tensor([[token, begin + place] for place, token in enumerate(tokens)], dtype=torch.float32)
    k_GTd = torch.cat([rows_T, rows_T[:, :1] * 100 + rows_T[:, 1:]], dim=-1).expand(HEADS, -1, -1)
    return k_GTd, -k_GTd


def bring(ring: Ring, slot: int, tokens: Sequence[int]) -> int:
    begin = ring.missing(slot, tokens, len(tokens))
    if begin < len(tokens):
        ring.write(slot, begin, tokens[begin:], *made(tokens[begin:], begin))
    return len(tokens) - begin


def check(ring: Ring, slot: int, tokens: Sequence[int]) -> None:
    """The last tokens in their order, as an unbounded cache would give them; and a draft's rows after them."""
    for most in (1, 3, SIZE):
        expected = [each[:, -most:] for each in made(tokens, 0)]
        for found, wanted in zip(ring.read(slot, most), expected, strict=True):
            assert torch.equal(found, wanted)
    rows = made([50, 51, 52, 53], 1000)
    ring.draft(slot, 0, *(each[:, :1] for each in rows))
    ring.draft(slot, 1, *(each[:, 1:] for each in rows))
    for found, tail, draft in zip(ring.read(slot, SIZE, SPARE), made(tokens, 0), rows, strict=True):
        assert torch.equal(found, torch.cat([tail[:, -SIZE:], draft], dim=1))


def new_ring() -> Ring:
    return Ring(SIZE, SPARE, HEADS, WIDTH, torch.float32, torch.device("cpu"))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_it_is_the_end_of_an_unbounded_cache(data: st.DataObject) -> None:
    """Tokens are added, rolled back, replaced by others and given to another request, in any order."""
    ring = new_ring()
    slots = [ring.acquire(), ring.acquire()]
    texts: list[list[int]] = [[1], [2]]
    for slot, text in zip(slots, texts, strict=True):
        bring(ring, slot, text)
    for _ in range(data.draw(st.integers(1, 12))):
        which = data.draw(st.integers(0, 1))
        kept = data.draw(st.integers(0, len(texts[which])))
        if data.draw(st.booleans()):
            kept = len(texts[which])
        texts[which] = texts[which][:kept] + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        if data.draw(st.integers(0, 4)) == 0:
            ring.release(slots[which])
            slots[which] = ring.acquire()
        bring(ring, slots[which], texts[which])
        for slot, text in zip(slots, texts, strict=True):  # the other request's tokens stay, too
            assert ring.missing(slot, text, len(text)) == len(text)
            check(ring, slot, text)


def test_a_place_follows_from_the_position_alone() -> None:
    """However the tokens came to be there, so that sums over places have the same bits."""
    for length in range(4 * SIZE):
        ring, text = new_ring(), list(range(length))
        once, often = ring.acquire(), ring.acquire()
        for end in (*range(0, length, 5), length):
            bring(ring, often, text[:end])
        bring(ring, once, text)
        assert ring.place(once) == ring.place(often) <= 2 * SIZE
        assert ring.place(once) % SIZE == length % SIZE


def test_only_new_parts_are_requested() -> None:
    ring = new_ring()
    slot = ring.acquire()
    assert bring(ring, slot, list(range(20))) == SIZE
    assert bring(ring, slot, list(range(22))) == 2
    assert bring(ring, slot, list(range(22))) == 0
    assert bring(ring, slot, list(range(21))) == SIZE  # what its tokens took the place of is gone
    assert bring(ring, slot, [*range(20), 99]) == SIZE


@pytest.mark.parametrize("length", [1, SIZE, 1000])
def test_memory_does_not_grow_with_the_text(length: int) -> None:
    ring = new_ring()
    slot = ring.acquire()
    for end in range(1, length + 1, 13):
        bring(ring, slot, list(range(end)))
    assert ring.num_bytes == BYTES
    assert ring.num_slots == 1
    ring.release(slot)
    assert (ring.num_slots, ring.num_bytes) == (0, BYTES)
    ring.acquire()
    assert ring.num_bytes == BYTES
