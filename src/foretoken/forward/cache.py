"""The K/V cache: a committed prefix per slot, and a speculative tail after it.

    slot s:  | committed prefix (lengths[s] rows) | tail: rows of the current step | unused ...
                                                    root  n0  n1  n2 ...

A step writes its rows into the tail; ``commit`` keeps the accepted rows and makes the prefix contiguous (a chain moves
nothing); ``rollback`` drops the tail. Since neither touches a committed row, "reject, then continue" leaves the cache
bit for bit as if the draft had never been.

Letters: S slots, G key/value heads, C capacity, D head width.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.pages import empty_in_large_pages

_FIRST_CAPACITY = 256
_serials = itertools.count()


class Follower(Protocol):
    """Keeps something of its own about committed rows. They never change; they are only forgotten."""

    def shortened(self, slot: int, length: int) -> None:
        """The slot was rolled back to ``length`` rows, or given back (0)."""
        ...


class Mover(Protocol):
    """Moves rows of all buffers faster than a copy of each can."""

    def move(self, cache: "KVCache", slot: int, to: int, rows: Sequence[int]) -> bool:
        """Rows of a slot, increasing, to ``to`` and the rows after it; False if it cannot, and nothing was moved."""
        ...


class KVCache:
    """Keys and values of every layer, per layer ``[S, G, C, D]``.

    Buffers are allocated at the first write from the shapes seen (value width may differ from key width, layers may
    differ from each other) and grow by doubling, as requests need them: no size has to be configured.

    Args:
        num_layers: layers that will write.
        max_slots: requests held at once, at most.
        max_length: rows per slot, at most.
        kv_dtype: of keys and values; None: as they are computed. uint8: a row is a scale and a code of 8 bits for each
            element, [D + 4]; only the native decoder writes and reads such rows (native/int8_kv.h).
        sources: of layers that read and write another layer's keys and values, that layer; they have none of their own.
    Attributes:
        lengths: committed rows of each slot.
        can_branch: whether a tail may be a tree; if not, drafts must be chains.
        can_roll_back: whether a committed prefix can be shortened to any length; if not, see :meth:`reachable`.
        keeps_keys: whether it keeps every committed row's keys and values, so that a drafter may read them.
        reads_as_written: whether a row of an answer leaves the same state as a row of a prompt.
    """

    def __init__(
        self,
        num_layers: int,
        max_slots: int,
        max_length: int,
        *,
        kv_dtype: torch.dtype | None = None,
        sources: Mapping[int, int] | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.sources = sources or {}
        self.max_slots = max_slots
        self.max_length = max_length
        self.num_slots = 1
        self.capacity = min(_FIRST_CAPACITY, max_length)
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.lengths: list[int] = [0] * max_slots
        self.serial = next(_serials)  # unique, unlike an address, which can be reused after a cache is freed
        self.generation = 0  # counts reallocations: stored addresses are invalid when it changes
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()  # they may end before the cache does
        self.can_branch = True
        self.can_roll_back = True
        self.kv_dtype = kv_dtype
        self.coded = kv_dtype == torch.uint8
        self.keeps_keys = not self.coded
        self.reads_as_written = True
        self.mover: Mover | None = None  # set by whoever knows all buffers' addresses
        self._free = list(range(max_slots - 1, -1, -1))  # lowest slot first: neighbours stay neighbours

    @property
    def free_slots(self) -> int:
        """Slots that can still be acquired."""
        return len(self._free)

    @property
    def grows_next(self) -> bool:
        """Whether the next slot to be acquired needs larger buffers."""
        return bool(self._free) and self._free[-1] >= self.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes held at present."""
        return sum(each.nbytes for each in (*self.keys, *self.values) if each is not None)

    def acquire(self) -> int:
        """Take an empty slot.

        Raises:
            RuntimeError: all slots are taken (the scheduler must not let that happen).
        """
        if not self._free:
            raise RuntimeError(f"all {self.max_slots} cache slots are taken")
        slot = self._free.pop()
        self.lengths[slot] = 0
        if slot >= self.num_slots:
            self._grow(min(self.max_slots, max(2 * self.num_slots, slot + 1)), self.capacity)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its rows are forgotten."""
        self._shorten(slot, 0)
        self._free.append(slot)
        self._free.sort(reverse=True)

    def reserve(self, slot: int, num_rows: int) -> None:
        """Reserve ``num_rows`` rows after the committed prefix.

        Raises:
            ValueError: the slot would exceed ``max_length``.
        """
        needed = self.lengths[slot] + num_rows
        if needed <= self.capacity:
            return
        if needed > self.max_length:
            raise ValueError(f"slot {slot} needs {needed} rows, the cache holds {self.max_length} at most")
        self._grow(self.num_slots, min(self.max_length, max(2 * self.capacity, needed)))

    def buffers(self, layer: int, k_GTD: Tensor, v_GTD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's buffers [S, G, C, D] and [S, G, C, Dv], allocated like ``k`` and ``v`` at the first call.

        Raises:
            ConfigError: the rows are codes, and these are not.
        """
        if self.coded and k_GTD.dtype != torch.uint8:
            raise ConfigError(
                "kv_cache_dtype='int8' is read by the native decoder alone, and here a plan has to read keys and "
                "values: leave it out"
            )
        layer = self.sources.get(layer, layer)
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            keys, values = (
                empty_rows(
                    like_GTD.new_empty(0, dtype=self.kv_dtype),
                    (self.num_slots, like_GTD.shape[0], self.capacity, like_GTD.shape[2]),
                )
                for like_GTD in (k_GTD, v_GTD)
            )
            self.keys[layer], self.values[layer] = keys, values
            self.generation += 1
        return keys, values

    def committed(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Keys [G, L, D] and values [G, L, Dv] of a layer's committed rows, in place: read them before the next write.

        Raises:
            ValueError: nothing was written yet.
        """
        layer = self.sources.get(layer, layer)
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            raise ValueError(f"layer {layer} has no keys yet")
        return keys[slot, :, : self.lengths[slot]], values[slot, :, : self.lengths[slot]]

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Keep these tail rows, in this order, and drop the others.

        Args:
            slot: the request's slot.
            rows: indices into the tail, strictly increasing (a path of a topologically ordered tree is).
        """
        start = self.lengths[slot]
        count = len(rows)
        first_moved = next((i for i, row in enumerate(rows) if row != i), count)
        sources = [start + row for row in rows[first_moved:]]
        if sources and (self.mover is None or not self.mover.move(self, slot, start + first_moved, sources)):
            index = torch.tensor(sources)
            with torch.inference_mode():  # the buffers are made inside a forward
                for buffer in (*self.keys, *self.values):
                    if buffer is not None:
                        index = index.to(buffer.device)
                        # index_select copies, so overlapping source and target are safe
                        buffer[slot, :, start + first_moved : start + count] = buffer[slot].index_select(1, index)
        self.lengths[slot] = start + count

    def rollback(self, slot: int, length: int) -> None:
        """Shorten the committed prefix to ``length`` rows; the tail is dropped with it."""
        if length > self.lengths[slot]:
            raise ValueError(f"cannot roll slot {slot} back to {length} rows: it has {self.lengths[slot]}")
        self._shorten(slot, length)

    def reachable(self, slot: int, length: int) -> int:
        """The longest length up to ``length`` that the slot can be rolled back to: any."""
        return min(length, self.lengths[slot])

    def mark(self, slot: int, max_bytes: int) -> None:
        """See to it that the slot can be rolled back to where it is now: it can, in any case."""

    def fork(self, slot: int) -> int:
        """A new slot with a copy of this slot's committed prefix."""
        twin = self.acquire()
        length = self.lengths[slot]
        with torch.inference_mode():
            for buffer in (*self.keys, *self.values):
                if buffer is not None:
                    buffer[twin, :, :length] = buffer[slot, :, :length]
        self.lengths[twin] = length
        return twin

    def _shorten(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        for follower in self.followers:
            follower.shortened(slot, length)

    def _grow(self, num_slots: int, capacity: int) -> None:
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                if old is not None:
                    new = empty_rows(old, (num_slots, old.shape[1], capacity, old.shape[3]))
                    new[: self.num_slots, :, : self.capacity] = old  # tails too: a draft may be under way
                    side[layer] = new
        self.num_slots, self.capacity = num_slots, capacity
        self.generation += 1


def empty_rows(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory of slots [S, ...], like another tensor; that of a single slot in large pages.

    Of several slots all may be short but one: each would fill whole pages with few rows.
    """
    alone = shape[0] == 1 and like.device.type == "cpu"
    return empty_in_large_pages(shape, like.dtype) if alone else like.new_empty(shape)
