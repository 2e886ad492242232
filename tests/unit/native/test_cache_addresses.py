"""Committed keys that are kept tiled, branches that are moved natively, and logits in memory that is used again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.native import build
from foretoken.native.shelf import Shelf
from helpers.golden import BRANCH, PARENTS, Session, random_tree, tokens_of
from helpers.zoo_llms import target

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

TEXT = tokens_of(1, 90, 8000)


def read(session: Session, slot: int, tokens: list[int], step: int = 90) -> torch.Tensor:
    return torch.cat([session.chunk(slot, tokens[begin : begin + step]) for begin in range(0, len(tokens), step)])


def addresses(session: Session) -> Any:
    found = session.cache.mover
    assert found is not None
    return found


def test_only_whole_committed_tiles_are_kept() -> None:
    session = Session(target())
    slot = session.cache.acquire()
    read(session, slot, TEXT[:40])
    assert int(addresses(session)._known_LSG.max()) == 0  # committed after the forward
    session.draft(slot, 7, random_tree(3, 8000))
    assert addresses(session)._known_LSG[:, slot].unique().tolist() == [2]  # 32 of 40 rows; the draft is not committed


@pytest.mark.parametrize("length", [1, 16, 31, 32, 50])
def test_after_a_rollback_other_rows_are_read(length: int) -> None:
    session, fresh = Session(target()), Session(target())
    slot, other = session.cache.acquire(), fresh.cache.acquire()
    read(session, slot, TEXT, 30)
    session.chunk(slot, [5])
    session.cache.rollback(slot, length)
    text = [*TEXT[:length], *tokens_of(2, 60, 8000)]
    read(fresh, other, text[:length])
    for begin in range(length, len(text), 17):
        assert torch.equal(session.chunk(slot, text[begin : begin + 17]), fresh.chunk(other, text[begin : begin + 17]))


def test_a_slot_given_back_is_read_anew() -> None:
    session, fresh = Session(target()), Session(target())
    slot = session.cache.acquire()
    read(session, slot, TEXT, 30)
    session.cache.release(slot)
    assert session.cache.acquire() == slot
    text = tokens_of(2, 60, 8000)
    assert torch.equal(read(session, slot, text, 20), read(fresh, fresh.cache.acquire(), text, 20))


def test_a_fork_goes_its_own_way() -> None:
    session, fresh = Session(target()), Session(target())
    slot = session.cache.acquire()
    read(session, slot, TEXT, 30)
    twin = session.cache.fork(slot)
    text = tokens_of(2, 40, 8000)
    own = read(session, twin, text, 20)
    read(session, slot, tokens_of(3, 40, 8000), 20)
    assert torch.equal(own, read(fresh, fresh.cache.acquire(), [*TEXT, *text], 30)[len(TEXT) :])


def test_rows_of_a_growing_cache_stay() -> None:
    session, fresh = Session(target()), Session(target())
    session.cache.capacity = 24  # no whole number of tiles, and too few
    slot, other = session.cache.acquire(), fresh.cache.acquire()
    assert torch.equal(read(session, slot, TEXT, 11), read(fresh, other, TEXT, 90))


def test_layers_run_in_two_spans_keep_their_own_tiles() -> None:
    """The lower layers have read further than the upper ones."""
    model = target()
    whole, parts = Session(model), Session(model)
    slots = whole.cache.acquire(), parts.cache.acquire()
    half = model.num_layers // 2

    for begin in range(0, len(TEXT), 18):
        tokens = TEXT[begin : begin + 18]
        expected = whole.chunk(slots[0], tokens)
        batch = PackedBatch()
        batch.add_chunk(slots[1], begin, tokens, wanted=len(tokens))
        parts.cache.reserve(slots[1], len(tokens))
        plan = DensePlan(parts.cache, batch)
        lower = PackedBatch()
        lower.add_chunk(slots[1], begin, tokens, wanted=0)
        hidden = model.forward(lower, plan, span=Span(0, half, taps=(half,))).hidden[half]
        found = model.forward(batch, plan, span=Span(half, model.num_layers, hidden)).logits_MV
        parts.cache.commit(slots[1], range(len(tokens)))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [[0, 1, 4, 8], [0, 2], [0], [], [3, 4, 5], [0, 1, 2]])
def test_a_branch_is_moved_as_copies_would(rows: list[int]) -> None:
    session = Session(target())
    slot, neighbour = session.cache.acquire(), session.cache.acquire()
    for each in (slot, neighbour):
        session.chunk(each, TEXT[:21])
    session.draft(slot, 7, TokenTree(tokens_of(4, len(PARENTS), 8000), PARENTS))
    before = [buffer.clone() for buffer in (*session.cache.keys, *session.cache.values) if buffer is not None]
    session.cache.commit(slot, rows)
    for old, new in zip(before, (*session.cache.keys, *session.cache.values), strict=True):
        expected = old[slot, :, [21 + row for row in rows]]
        assert torch.equal(new[slot, :, 21 : 21 + len(rows)], expected)  # type: ignore[index]
        assert torch.equal(new[slot, :, :21], old[slot, :, :21])  # type: ignore[index]
        # Rows without any write hold whatever the memory held, perhaps no numbers: the bits are compared.
        bits = [each[neighbour].contiguous().view(torch.uint8) for each in (new, old)]  # type: ignore[index]
        assert torch.equal(*bits)
    assert session.cache.lengths[slot] == 21 + len(rows)


@pytest.mark.parametrize("rows", [[10**6], [0, 5, 3]])
def test_a_branch_that_is_none_is_refused(rows: list[int]) -> None:
    session = Session(target())
    slot = session.cache.acquire()
    session.draft(slot, 7, TokenTree(tokens_of(4, len(PARENTS), 8000), PARENTS))
    with pytest.raises(ValueError, match="cannot go to"):
        session.cache.commit(slot, rows)


def test_a_branch_of_a_cache_that_has_grown_is_moved_in_its_new_place() -> None:
    session = Session(target())
    slot = session.cache.acquire()
    session.draft(slot, 7, TokenTree(tokens_of(4, len(PARENTS), 8000), PARENTS))
    session.cache.reserve(slot, 2 * session.cache.capacity)
    kept = [0, *(node + 1 for node in BRANCH)]
    expected = [keys[slot, :, kept].clone() for keys in session.cache.keys if keys is not None]
    session.cache.commit(slot, kept)
    for keys, rows in zip(session.cache.keys, expected, strict=True):
        assert torch.equal(keys[slot, :, : len(kept)], rows)  # type: ignore[index]


def test_logits_in_use_are_not_overwritten() -> None:
    session = Session(target())
    slot = session.cache.acquire()
    model = session.model
    kept, copies = [], []
    for _ in range(8):
        batch = PackedBatch()
        begin = session.cache.lengths[slot]
        batch.add_chunk(slot, begin, TEXT[begin : begin + 3], wanted=3)
        session.cache.reserve(slot, 3)
        logits = model.forward(batch, DensePlan(session.cache, batch)).logits_MV
        session.cache.commit(slot, range(3))
        kept.append(logits[1:])  # a view
        copies.append(logits[1:].clone())
        del logits
    assert all(torch.equal(view, copy) for view, copy in zip(kept, copies, strict=True))


def test_a_shelf_gives_memory_out_again_once_it_is_free() -> None:
    shelf = Shelf()
    first = shelf.take(4, 100)
    address = first.data_ptr()
    view = first[1:, 3:]
    del first
    second = shelf.take(4, 100)
    assert second.data_ptr() != address
    del view
    gc.collect()
    assert shelf.take(2, 50).data_ptr() == address
