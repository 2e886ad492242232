"""The memory of state-space layers for each request: a state after the committed prefix, and the rows of a tail.

    slot s, layer l:   base: state after `absorbed` tokens     inputs of the rows after them
                       conv: the W - 1 raw rows before them     | committed, pending | root  n0  n1  n2 ...

A recurrence cannot be shortened, so a row that may yet be refused is never written into a state. A forward keeps the
*inputs* of its rows instead, a thousandth of a state each (activation replay, STree section 4.3). ``commit`` gathers
those of the accepted path, and they are pending until the next forward, which absorbs them into the base first, in
order, each layer for itself. A forward that failed between two layers, or has its result dropped, can therefore be
repeated. The long chunks of a prompt would be computed twice that way; they are read into a state next to the base,
which takes its place when they are committed.

A slot can be rolled back to a length if its later rows are not yet absorbed, to a mark, or to 0. A mark is a copy of a
slot's states at some length; a chunk of a prompt may end there for its sake. Releasing a slot drops states and marks.

Letters: L mixers, S slots, H heads, N state size, P head width, W taps, C channels, R rows of a tail.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.ssm import scan
from foretoken.forward.ssm.layout import KINDS, Kind, Mixer, Projected, windows
from foretoken.forward.ssm.marks import Mark, Marks

LONG = 16  # a chunk of more rows is read into a state next to the base
_STEP = 4  # tails grow by so many rows


@dataclass(slots=True)
class _Ahead:
    """The state after a chunk that is not committed yet.

    Attributes:
        length: tokens after which it is.
        base_LHNP, conv_LWC: as in the cache.
        layers: mixers that have come so far.
    """

    length: int
    base_LHNP: Tensor
    conv_LWC: Tensor
    layers: set[int] = field(default_factory=set)


class StateCache:
    """States of every mixer of a model, all of one size.

    Args:
        mixers: of the model.
        dtype: of the convolution's inputs; states are float32, or wider where the model is.
        device: the model's.
        layers: those that forwards run; None: all.
    """

    def __init__(
        self, mixers: Sequence[Mixer], dtype: torch.dtype, device: torch.device, layers: Collection[int] | None = None
    ) -> None:
        one = mixers[0]
        self.dtype = dtype
        self.place = {mixer.layer: number for number, mixer in enumerate(mixers)}
        self._run = {place for layer, place in self.place.items() if layers is None or layer in layers}
        self.num_slots = 1
        self.capacity = 0  # rows of a tail
        self.taps = one.taps
        wide = torch.promote_types(dtype, torch.float32)
        L = len(mixers)
        with torch.inference_mode(False):
            self.base_LSHNP = torch.zeros(L, 1, one.heads, one.state_size, one.head_width, dtype=wide, device=device)
            self.conv_LSWC = torch.zeros(L, 1, one.taps - 1, one.channels, dtype=dtype, device=device)
            self.raw_LSRC = torch.zeros(L, 1, 0, one.channels, dtype=dtype, device=device)
            self.gates_LSR2H = torch.zeros(L, 1, 0, 2, one.heads, dtype=wide, device=device)
        self.absorbed_LS = [[0] for _ in mixers]
        self.begin_S = [0]  # token that row 0 of a slot's tail stands for
        self.ahead: dict[int, _Ahead] = {}
        self._marks = Marks()
        free = one.limits == (0.0, float("inf"))
        self.reads_as_written = free or one.limited in (frozenset(), frozenset(KINDS))

    @property
    def num_bytes(self) -> int:
        """Bytes held at present."""
        held = [self.base_LSHNP, self.conv_LSWC, self.raw_LSRC, self.gates_LSR2H]
        held += [each for ahead in self.ahead.values() for each in (ahead.base_LHNP, ahead.conv_LWC)]
        return sum(each.nbytes for each in held) + self._marks.num_bytes

    def floor(self, slot: int) -> int:
        """The shortest length next to 0 that a slot can be rolled back to."""
        return max(absorbed[slot] for absorbed in self.absorbed_LS)

    def reachable(self, slot: int, length: int) -> int:
        """The longest length up to ``length`` that a slot can be rolled back to."""
        return length if length >= self.floor(slot) else self._marks.reachable(slot, length)

    def mark(self, slot: int, length: int, max_bytes: int) -> None:
        """Copy the states of a slot now, after ``length`` tokens, so that it can be rolled back to this length.

        Args:
            max_bytes: of all marks; those that were used least recently are forgotten until the others fit.
        """
        if self._marks.is_at(slot, length):
            return
        begin = self.begin_S[slot]
        rows = slice(0, length - begin)
        with torch.inference_mode():
            mark = Mark(
                length,
                begin,
                [absorbed[slot] for absorbed in self.absorbed_LS],
                self.base_LSHNP[:, slot].clone(),
                self.conv_LSWC[:, slot].clone(),
                self.raw_LSRC[:, slot, rows].clone(),
                self.gates_LSR2H[:, slot, rows].clone(),
            )
        self._marks.add(slot, mark, max_bytes)

    def clear(self, slot: int) -> None:
        """Clear a slot: drop the state and the convolution's rows of the request that used it before."""
        self._marks.forget(slot)
        with torch.inference_mode():
            self.base_LSHNP[:, slot] = 0
            self.conv_LSWC[:, slot] = 0
        self._set(slot, 0)

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Keep these rows of the tail after ``length`` tokens, pending, and drop the others.

        Raises:
            RuntimeError: of a long chunk not all rows are to be kept: its rows were not.
        """
        ahead = self.ahead.pop(slot, None)
        if ahead is not None:
            if ahead.length != length + len(rows) or ahead.layers != self._run:
                raise RuntimeError(f"a chunk of {ahead.length - length} rows is committed whole, not {len(rows)} of it")
            with torch.inference_mode():
                self.base_LSHNP[:, slot] = ahead.base_LHNP
                self.conv_LSWC[:, slot] = ahead.conv_LWC
            self._set(slot, ahead.length)
            return
        begin = self.begin_S[slot]
        floor = min(absorbed[slot] for absorbed in self.absorbed_LS)  # rows that some layer has not read yet stay
        sources = [*range(floor - begin, length - begin), *(length - begin + row for row in rows)]
        if sources != list(range(len(sources))):
            index = torch.tensor(sources, device=self.raw_LSRC.device)
            with torch.inference_mode():
                for buffer in (self.raw_LSRC, self.gates_LSR2H):
                    # index_select copies, so overlapping source and target are safe
                    buffer[:, slot, : len(sources)] = buffer[:, slot].index_select(1, index)
        self.begin_S[slot] = floor

    def rollback(self, slot: int, length: int) -> None:
        """Forget tokens from ``length`` on.

        Raises:
            ValueError: a layer has absorbed some of them, states cannot be shortened, and no mark reaches there.
        """
        self.ahead.pop(slot, None)
        if length == 0:
            self.clear(slot)
            return
        if length < self.floor(slot):
            mark = self._marks.to(slot, length)
            if mark is None:
                raise ValueError(
                    f"slot {slot} cannot go back to {length} tokens: its states stand after {self.floor(slot)}; roll "
                    "it back to 0 and read the text again, or mark or fork the slot before reading rows that may be "
                    "rolled back"
                )
            self._go_back(slot, mark)
        self._marks.cut(slot, length)

    def fork(self, slot: int, twin: int) -> None:
        """Copy a slot's states and pending rows into another one."""
        with torch.inference_mode():
            for buffer in (self.base_LSHNP, self.conv_LSWC, self.raw_LSRC, self.gates_LSR2H):
                buffer[:, twin] = buffer[:, slot]
        for absorbed in self.absorbed_LS:
            absorbed[twin] = absorbed[slot]
        self.begin_S[twin] = self.begin_S[slot]
        self._marks.share(slot, twin)

    def grow_slots(self, num_slots: int) -> None:
        """Grow the buffers to at least ``num_slots`` slots."""
        if num_slots > self.num_slots:
            self._grow(num_slots, self.capacity)

    # ------------------------------------------------------------------ forwards

    def prepare(self, segment: Segment) -> None:
        """Before a forward: a long chunk is given a state of its own, other rows a place in the tail."""
        slot, length = segment.slot, segment.prefix + segment.tail + segment.num_rows
        if not is_long(segment):
            self.ahead.pop(slot, None)
            needed = length - self.begin_S[slot]
            if needed > self.capacity:
                self._grow(self.num_slots, -(-needed // _STEP) * _STEP)
        elif slot not in self.ahead or self.ahead[slot].length != length:  # else its first layers have come already
            base_LHNP = torch.empty_like(self.base_LSHNP[:, slot])
            self.ahead[slot] = _Ahead(length, base_LHNP, torch.empty_like(self.conv_LSWC[:, slot]))

    def mix(
        self,
        mixer: Mixer,
        segment: Segment,
        raw_TC: Tensor,
        gates_T2H: Tensor,
        committed: int,
        *,
        scanned: bool = False,
    ) -> Tensor:
        """The recurrence's output for a segment's rows, after its prefix and along its tree: [T, H, P].

        Pending rows are absorbed into the base, and the inputs of the segment's rows are kept.

        Args:
            raw_TC, gates_T2H: of the segment's rows.
            committed: tokens of the slot that are committed.
            scanned: compute all rows at once (tree and chunk scan) instead of one by one.
        """
        place, slot = self.place[mixer.layer], segment.slot
        begin = self.begin_S[slot]
        first = segment.prefix + segment.tail - begin
        long = is_long(segment)
        if not long:
            self.raw_LSRC[place, slot, first : first + len(raw_TC)] = raw_TC
            self.gates_LSR2H[place, slot, first : first + len(raw_TC)] = gates_T2H
        self.absorb(mixer, slot, committed, scanned=scanned)
        base_HNP, conv_WC = self.base_LSHNP[place, slot], self.conv_LSWC[place, slot]
        if long:
            rows = mixer.rows(windows(raw_TC, self.taps, conv_WC), gates_T2H)
            run = scan.chunk_scan if scanned else _walk_chain
            y_THP, after_HNP = run(base_HNP, rows)
            ahead = self.ahead[slot]
            ahead.base_LHNP[place] = after_HNP
            ahead.conv_LWC[place] = torch.cat([conv_WC, raw_TC])[len(raw_TC) :]
            ahead.layers.add(place)
            return mixer.skipped(y_THP, rows)
        behind = slice(committed - begin, first + len(raw_TC))
        parents = parents_of(segment, committed)
        raw_RC = self.raw_LSRC[place, slot, behind]
        index_RW = tap_index(parents, self.taps).to(raw_RC.device)
        rows = mixer.rows(torch.cat([conv_WC, raw_RC])[index_RW], self.gates_LSR2H[place, slot, behind])
        if scanned:
            y_RHP = scan.tree_scan(base_HNP, rows, parents)
        else:
            y_RHP = scan.walk(base_HNP, rows, parents)[0]
        return mixer.skipped(y_RHP, rows)[len(rows) - len(raw_TC) :]

    def absorb(self, mixer: Mixer, slot: int, committed: int, *, scanned: bool = False) -> None:
        """Run the pending rows of a layer, up to ``committed`` tokens, through its state."""
        place, begin = self.place[mixer.layer], self.begin_S[slot]
        pending = slice(self.absorbed_LS[place][slot] - begin, committed - begin)
        if pending.start >= pending.stop:
            return
        raw_TC, gates_T2H = self.raw_LSRC[place, slot, pending], self.gates_LSR2H[place, slot, pending]
        base_HNP, conv_WC = self.base_LSHNP[place, slot], self.conv_LSWC[place, slot]
        rows = mixer.rows(windows(raw_TC, self.taps, conv_WC), gates_T2H)
        after_HNP = scan.fold(base_HNP, rows) if scanned else _walk_chain(base_HNP, rows)[1]
        history_XC = torch.cat([conv_WC, raw_TC])[len(raw_TC) :]
        # nothing was written before everything was computed: an interrupted forward is repeated from where it stood
        with torch.inference_mode():
            self.base_LSHNP[place, slot] = after_HNP
            self.conv_LSWC[place, slot] = history_XC
        self.absorbed_LS[place][slot] = committed

    def _go_back(self, slot: int, mark: Mark) -> None:
        with torch.inference_mode():
            self.base_LSHNP[:, slot] = mark.base_LHNP
            self.conv_LSWC[:, slot] = mark.conv_LWC
            self.raw_LSRC[:, slot, : mark.raw_LRC.shape[1]] = mark.raw_LRC
            self.gates_LSR2H[:, slot, : mark.gates_LR2H.shape[1]] = mark.gates_LR2H
        for absorbed, length in zip(self.absorbed_LS, mark.absorbed_L, strict=True):
            absorbed[slot] = length
        self.begin_S[slot] = mark.begin

    def _set(self, slot: int, length: int) -> None:
        for absorbed in self.absorbed_LS:
            absorbed[slot] = length
        self.begin_S[slot] = length
        self.ahead.pop(slot, None)

    def _grow(self, num_slots: int, capacity: int) -> None:
        old_slots, old_capacity = self.num_slots, self.capacity
        if num_slots > old_slots:
            self.base_LSHNP = _larger(self.base_LSHNP, 1, num_slots)
            self.conv_LSWC = _larger(self.conv_LSWC, 1, num_slots)
            for absorbed in self.absorbed_LS:
                absorbed += [0] * (num_slots - old_slots)
            self.begin_S += [0] * (num_slots - old_slots)
        with torch.inference_mode(False):
            for name in ("raw_LSRC", "gates_LSR2H"):
                old = getattr(self, name)
                new = old.new_zeros((old.shape[0], num_slots, capacity, *old.shape[3:]))
                new[:, :old_slots, :old_capacity] = old  # tails too: a draft may be under way
                setattr(self, name, new)
        self.num_slots, self.capacity = num_slots, capacity


def is_prompt(segment: Segment) -> bool:
    """Whether a segment is a chunk of known text."""
    return segment.seen is None and not segment.tail and not segment.verification


def kinds_of(batch: PackedBatch) -> list[Kind]:
    """The kinds of the rows of a batch."""
    wanted = set(batch.wanted)
    kinds: list[Kind] = []
    for segment in batch.segments:
        count, first = segment.num_rows, segment.prefix + segment.tail == 0
        if is_prompt(segment):
            whole = first and count == 1 and segment.start in wanted
            kinds += ["only" if whole else "prompt"] * count
        else:  # a draft after a prompt of one token begins with it
            later: list[Kind] = ["later"] * count
            kinds += ["only", *later[1:]] if first else later
    return kinds


def is_long(segment: Segment) -> bool:
    """Whether it is one that is read into a state next to the base."""
    return is_prompt(segment) and segment.num_rows > LONG


def parents_of(segment: Segment, committed: int) -> list[int]:
    """The parent of every row after the committed prefix; -1: the prefix, -2: no row of the segment follows it."""
    ahead = segment.prefix - committed  # rows that a drafter calls prefix already
    size = ahead + segment.tail + segment.num_rows
    if segment.seen is None:
        return scan.chain_of(size)
    parents = [-2] * size
    for row in range(ahead):
        parents[row] = row - 1
    for seen in segment.seen.tolist():
        before = ahead - 1
        for column, sees in enumerate(seen):
            if sees:
                parents[ahead + column] = before
                before = ahead + column
    return parents


def tap_index(parents: Sequence[int], taps: int) -> Tensor:
    """Which rows of (W - 1 earlier ones, the tail) the convolution reads of each row, along its path: int64 [R, W]."""
    found: list[list[int]] = []
    start = list(range(taps - 1))
    for row, parent in enumerate(parents):
        before = found[parent][1:] if parent >= 0 else start
        found.append([*before, row + taps - 1])
    return torch.tensor(found)


def _walk_chain(state_HNP: Tensor, rows: scan.Rows) -> tuple[Tensor, Tensor]:
    return scan.walk(state_HNP, rows, scan.chain_of(len(rows)))


def _larger(buffer: Tensor, dim: int, size: int) -> Tensor:
    with torch.inference_mode(False):
        shape = list(buffer.shape)
        shape[dim] = size
        new = buffer.new_zeros(shape)
        new.narrow(dim, 0, buffer.shape[dim]).copy_(buffer)
    return new


class HybridCache(KVCache):
    """Keys and values of the layers that attend, states of those that have mixers: one prefix and one tail.

    Args:
        num_layers, max_slots, max_length: as for :class:`KVCache`.
        states: of the same model.
    """

    def __init__(self, num_layers: int, max_slots: int, max_length: int, states: StateCache) -> None:
        super().__init__(num_layers, max_slots, max_length)
        self.states = states
        self.can_roll_back = False
        self.reads_as_written = states.reads_as_written

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.states.num_bytes

    def acquire(self) -> int:
        slot = super().acquire()
        self.states.grow_slots(self.num_slots)
        self.states.clear(slot)
        return slot

    def release(self, slot: int) -> None:
        self.states.clear(slot)
        super().release(slot)

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        self.states.commit(slot, self.lengths[slot], rows)
        super().commit(slot, rows)

    def rollback(self, slot: int, length: int) -> None:
        if length > self.lengths[slot]:
            raise ValueError(f"cannot roll slot {slot} back to {length} rows: it has {self.lengths[slot]}")
        self.states.rollback(slot, length)
        super().rollback(slot, length)

    def reachable(self, slot: int, length: int) -> int:
        """The longest length up to ``length`` that no state has gone beyond, or that a mark has; else 0."""
        return self.states.reachable(slot, min(length, self.lengths[slot]))

    def mark(self, slot: int, max_bytes: int) -> None:
        self.states.mark(slot, self.lengths[slot], max_bytes)

    def fork(self, slot: int) -> int:
        twin = super().fork(slot)
        self.states.fork(slot, twin)
        return twin


def cache_for(
    mixers: Sequence[Mixer],
    num_layers: int,
    max_slots: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: Collection[int] | None = None,
) -> KVCache:
    """An empty cache for a model with these mixers, perhaps none; ``layers``: those that forwards run, or all."""
    if not mixers:
        return KVCache(num_layers, max_slots, max_length)
    return HybridCache(num_layers, max_slots, max_length, StateCache(mixers, dtype, device, layers))


class Mixing:
    """The recurrences of one forward: every segment's rows after their slot's state.

    Args:
        cache: of a model with mixers.
        batch: the rows.
        scanned: compute all rows at once instead of one by one.
    """

    def __init__(self, cache: KVCache, batch: PackedBatch, *, scanned: bool = False) -> None:
        assert isinstance(cache, HybridCache), "a model with state-space layers makes its own cache"
        self._cache, self._segments, self._scanned = cache, batch.segments, scanned
        self._kinds = kinds_of(batch)
        for segment in batch.segments:
            cache.states.prepare(segment)

    def __call__(self, mixer: Mixer, projected: Projected) -> Tensor:
        """y [T, H, P] of all rows."""
        gates_T2H = mixer.gates(projected.steps_TH, self._kinds)
        outputs = []
        for segment in self._segments:
            rows = slice(segment.start, segment.start + segment.num_rows)
            committed = min(segment.prefix, self._cache.lengths[segment.slot])
            raw_TC, scanned = projected.raw_TC[rows], self._scanned
            outputs.append(self._cache.states.mix(mixer, segment, raw_TC, gates_T2H[rows], committed, scanned=scanned))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
