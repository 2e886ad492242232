"""What any cache (forward/cache.py) must do, whatever it keeps: implementations are listed in IMPLEMENTATIONS.

A cache keeps a memory of committed rows. The adapter of an implementation says how a step writes rows into the tail
and how kept rows are read back; everything else goes through the public members alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.forward.cache import KVCache

SLOTS, LENGTH = 4, 40
LAYERS, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 3, 4


class Kept(ABC):
    """One implementation under test.

    Attributes:
        cache: a fresh one of ``SLOTS`` slots and ``LENGTH`` rows.
    """

    cache: KVCache

    @abstractmethod
    def write(self, slot: int, rows: Sequence[float], parents: Sequence[int]) -> None:
        """What a forward does with reserved rows, a tree; the parent -1 is the last committed row."""

    @abstractmethod
    def remembered(self, slot: int) -> list[Tensor]:
        """All that the committed prefix of a slot consists of, copied."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of every tensor that the cache holds, counted by looking at them."""


class KeptKeys(Kept):
    """Keys and values of two layers; a row is a number, and its stored form depends on the row alone."""

    def __init__(self) -> None:
        self.cache: KVCache = KVCache(LAYERS, SLOTS, LENGTH)
        self.cache.capacity = 4  # the first size; small, so that buffers grow in these tests

    def write(self, slot: int, rows: Sequence[float], parents: Sequence[int]) -> None:
        begin = self.cache.lengths[slot]
        like = torch.tensor(rows)[None, :, None]
        for layer in range(LAYERS):
            k_GTD, v_GTD = like.expand(HEADS, -1, WIDTH) + layer, -like.expand(HEADS, -1, VALUE_WIDTH) - layer
            keys, values = self.cache.buffers(layer, k_GTD, v_GTD)
            keys[slot, :, begin : begin + len(rows)] = k_GTD
            values[slot, :, begin : begin + len(rows)] = v_GTD

    def remembered(self, slot: int) -> list[Tensor]:
        length = self.cache.lengths[slot]
        if not length:
            return []
        return [each[slot, :, :length].clone() for each in self._buffers()]

    def held_bytes(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in self._buffers())

    def _buffers(self) -> list[Tensor]:
        return [each for each in (*self.cache.keys, *self.cache.values) if each is not None]


IMPLEMENTATIONS: dict[str, Callable[[], Kept]] = {"keys and values": KeptKeys}

every = pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
quick = settings(max_examples=60, deadline=None)


def step(kept: Kept, slot: int, rows: Sequence[float], parents: Sequence[int]) -> None:
    """Reserve and write, as the engine does."""
    kept.cache.reserve(slot, len(rows))
    kept.write(slot, rows, parents)


def fresh(kept_rows: Sequence[float], make: Callable[[], Kept]) -> list[Tensor]:
    """The rows of a text that was never drafted, forked or cut: row by row into a new cache."""
    plain = make()
    slot = plain.cache.acquire()
    for row in kept_rows:
        step(plain, slot, [row], [-1])
        plain.cache.commit(slot, [0])
    return plain.remembered(slot)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def a_tail(data: st.DataObject, most: int, branch: bool) -> tuple[list[int], list[int]]:
    """Parents of up to ``most`` rows, one tree or chain, and a path of it from its first row on (perhaps empty)."""
    count = data.draw(st.integers(1, most))
    parents = [-1, *(data.draw(st.integers(0, row - 1)) if branch else row - 1 for row in range(1, count))]
    last = data.draw(st.integers(-1, count - 1))
    path: list[int] = []
    while last >= 0:
        path.append(last)
        last = parents[last]
    return parents, path[::-1]


@every
@quick
@given(data=st.data())
def test_any_history_leaves_what_its_committed_rows_leave_alone(make: Callable[[], Kept], data: st.DataObject) -> None:
    """Slots come and go, tails are written, kept in part or dropped, prefixes are cut and forked.

    The model is a list of rows for every slot. The kept rows equal, bit for bit, those of a new
    cache after the same rows: so "reject, then continue" is "never drafted".
    """
    kept = make()
    cache = kept.cache
    rows_of: dict[int, list[float]] = {}
    number = 1.0
    for _ in range(data.draw(st.integers(1, 20))):
        held = sorted(rows_of)
        moves = ["acquire", *(["fork"] if held else [])] if cache.free_slots else []
        moves += ["keep", "reject", "rollback", "release"] if held else []
        move = data.draw(st.sampled_from(moves))
        slot = data.draw(st.sampled_from(held)) if held else -1
        if move == "acquire":
            slot = cache.acquire()
            assert slot not in rows_of
            rows_of[slot] = []
        elif move == "fork":
            twin = cache.fork(slot)
            assert twin not in rows_of
            rows_of[twin] = list(rows_of[slot])
        elif move in ("keep", "reject"):
            room = LENGTH - len(rows_of[slot])
            if room:
                parents, path = a_tail(data, min(9, room), cache.can_branch)
                tail = [number + row for row in range(len(parents))]
                number += len(tail)
                step(kept, slot, tail, parents)
                if move == "keep":
                    cache.commit(slot, path)
                    rows_of[slot] += [tail[row] for row in path]
        elif move == "rollback":
            most = len(rows_of[slot])
            length = data.draw(st.integers(0, most)) if cache.can_roll_back else data.draw(st.sampled_from([0, most]))
            cache.rollback(slot, length)
            del rows_of[slot][length:]
        else:
            cache.release(slot)
            del rows_of[slot]
        assert cache.num_bytes == kept.held_bytes()
        assert cache.free_slots == SLOTS - len(rows_of)
        for each, rows in rows_of.items():
            assert cache.lengths[each] == len(rows)
            assert same(kept.remembered(each), fresh(rows, make))


@every
@quick
@given(data=st.data())
def test_a_fork_and_its_origin_never_feel_each_other(make: Callable[[], Kept], data: st.DataObject) -> None:
    kept = make()
    slot = kept.cache.acquire()
    length = data.draw(st.integers(1, 12))
    step(kept, slot, [float(row) for row in range(length)], range(-1, length - 1))
    kept.cache.commit(slot, range(length))
    twin = kept.cache.fork(slot)
    before = kept.remembered(slot)
    assert same(kept.remembered(twin), before)
    changed, other = (slot, twin) if data.draw(st.booleans()) else (twin, slot)
    step(kept, changed, [100.0, 101.0], [-1, 0])
    kept.cache.commit(changed, data.draw(st.sampled_from([[], [0], [0, 1]])))
    assert same(kept.remembered(other), before)
    kept.cache.release(changed)
    assert same(kept.remembered(other), before)


@every
def test_a_cache_begins_empty_and_is_bounded(make: Callable[[], Kept]) -> None:
    cache = make().cache
    assert (cache.max_slots, cache.max_length, cache.free_slots) == (SLOTS, LENGTH, SLOTS)
    slots = [cache.acquire() for _ in range(SLOTS)]
    assert sorted(slots) == list(range(SLOTS))
    with pytest.raises(RuntimeError, match=f"all {SLOTS} cache slots are taken"):
        cache.acquire()
    with pytest.raises(RuntimeError, match=f"all {SLOTS} cache slots are taken"):
        cache.fork(slots[0])
    with pytest.raises(ValueError, match=rf"needs {LENGTH + 1} rows.* {LENGTH} at most"):
        cache.reserve(slots[0], LENGTH + 1)
    with pytest.raises(ValueError, match="cannot roll slot"):
        cache.rollback(slots[0], 1)


@every
def test_an_implementation_declares_its_abilities(make: Callable[[], Kept]) -> None:
    cache: Any = make().cache
    assert isinstance(cache, KVCache)
    assert isinstance(cache.reads_as_written, bool)
    assert isinstance(cache.can_branch, bool)
    assert isinstance(cache.can_roll_back, bool)
    assert isinstance(cache.keeps_keys, bool)


@every
def test_committed_rows_can_be_read_in_place(make: Callable[[], Kept]) -> None:
    """The committed rows and none of the tail, in the memory that the forward writes."""
    kept = make()
    if not kept.cache.keeps_keys:
        pytest.skip("keeps no keys")
    slot = kept.cache.acquire()
    kept.cache.reserve(slot, 3)
    kept.write(slot, [1.0, 2.0, 3.0], [-1, 0, 0])
    kept.cache.commit(slot, [0, 2])
    found = [kept.cache.committed(layer, slot) for layer in range(LAYERS)]
    given = [*(keys for keys, _ in found), *(values for _, values in found)]
    for view, expected in zip(given, kept.remembered(slot), strict=True):
        assert torch.equal(view, expected)
    given[0].zero_()
    assert not bool(kept.remembered(slot)[0].any())


# ------------------------------------------------------------------ planted: the tests above can fail


class Careless(KeptKeys):
    """A cache with a mistake of a kind that a state-space cache could make."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        plain = self.cache.commit

        def commit(slot: int, rows: Sequence[int]) -> None:
            if mistake == "keeps the tail's order":
                rows = range(len(rows))
            plain(slot, rows)

        def fork(slot: int) -> int:
            twin = self.cache.acquire()
            self.cache.lengths[twin] = self.cache.lengths[slot]  # the rows are not copied
            return twin

        self.cache.commit = commit  # type: ignore[method-assign]
        if mistake == "forks by name only":
            self.cache.fork = fork  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", ["keeps the tail's order", "forks by name only"])
def test_a_careless_cache_is_caught(mistake: str) -> None:
    inner = test_any_history_leaves_what_its_committed_rows_leave_alone.hypothesis.inner_test  # type: ignore[attr-defined]
    makes = iter([lambda: Careless(mistake)])

    def make() -> Kept:
        """The first cache of an example is the careless one; those that it is compared with are not."""
        return next(makes, KeptKeys)()

    @settings(max_examples=300, deadline=None, database=None)
    @given(data=st.data())
    def search(data: st.DataObject) -> None:
        nonlocal makes
        makes = iter([lambda: Careless(mistake)])
        inner(make, data)

    with pytest.raises(BaseException, match=r"assert|distinct"):
        search()
