"""State-space layers in the native decoder: the descriptions of a mixer and of a cache's states.

    steps   rows after the committed prefix, depth first, with the level of the state that each follows and leaves

        root ── a ─┬─ b ── c      row     root  a  b  c  d      a level is one state of a head; the last child of a row
                   └─ d           from     -1   0  0  1  0      goes on in its parent's, so that a chain needs one
                                  to        0   0  1 -1 -1      and a tree one for each open branch

Letters: L mixers, S slots, H heads, N state size, P head width, W taps, C channels, R rows of a tail.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.span import Span
from foretoken.forward.ssm.layout import Mixer
from foretoken.forward.ssm.state import HybridCache, is_long, kinds_of, parents_of, tap_index
from foretoken.native import structs
from foretoken.native.layout import StateBlock

_MAX_TAPS = 8  # of types.h


def misfit(mixer: Mixer) -> str | None:
    """Why the native decoder cannot run a mixer; None if it can."""
    if mixer.state_size % 16 or mixer.head_width % 16 or mixer.taps > _MAX_TAPS:
        return (
            f"its mixers have heads of {mixer.head_width} by {mixer.state_size} and {mixer.taps} taps: multiples of "
            f"16, and at most {_MAX_TAPS}"
        )
    if (mixer.heads * mixer.head_width // mixer.groups) % 16:
        return "the groups of its mixers' norms are no multiples of 16"
    return None


def described_mixer(native: structs.Mixer, block: StateBlock, place: int, stride: int, keep: list[Any]) -> None:
    """Fill in the description of one mixer.

    Args:
        stride: floats of a projected row, padded to whole tiles.
        keep: memory that native code reads is added to it.
    """
    mixer = block.mixer

    def floats(values: Tensor) -> int:
        kept = values.detach().to(torch.float32).contiguous()
        keep.append(kept)
        return kept.data_ptr()

    native.place, native.heads, native.groups = place, mixer.heads, mixer.groups
    native.state, native.width, native.taps = mixer.state_size, mixer.head_width, mixer.taps
    native.channels, native.inner, native.stride = mixer.channels, mixer.heads * mixer.head_width, stride
    native.norm_group, native.eps = block.norm_group, block.norm_eps
    native.low, native.high = mixer.limits
    native.conv = floats(mixer.conv_CW.T)
    native.conv_bias = None if mixer.conv_bias_C is None else floats(mixer.conv_bias_C)
    native.rate, native.step_bias = floats(mixer.rate_H), floats(mixer.step_bias_H)
    native.skip = floats(torch.zeros(mixer.heads) if mixer.skip_H is None else mixer.skip_H)
    native.gain, native.norm_first = floats(block.gain_I), int(block.norm_first)
    native.is_short, native.is_delta, native.most_factor = int(mixer.short), int(mixer.delta), mixer.most_factor


class NativeStates:
    """A cache's states as one forward reads them; hold it while native code runs, then call :meth:`done`.

    Args:
        mixers: of the decoder, by layer.
        cache: of its model.
        batch, span: of the forward.
        dtype: of the decoder.
    Raises:
        ValueError: the cache is another model's.
    """

    def __init__(
        self, mixers: dict[int, Mixer], cache: KVCache, batch: PackedBatch, span: Span, dtype: torch.dtype
    ) -> None:
        if not isinstance(cache, HybridCache):
            raise ValueError("the cache holds no states: a model with state-space layers makes its own (new_cache)")
        self._cache, self._batch = cache, batch
        self._layers = [layer for layer in range(span.first, span.last) if layer in mixers]
        states, one = cache.states, next(iter(mixers.values()))
        expected = (len(mixers), states.num_slots, one.heads, one.state_size, one.head_width)
        if states.base_LSHNP.shape != expected or states.base_LSHNP.dtype != torch.float32 or states.dtype != dtype:
            raise ValueError(
                f"the cache's states are {list(states.base_LSHNP.shape)} for rows of {states.dtype}, but this decoder "
                f"writes {list(expected)} for rows of {dtype}: give it a cache of its own"
            )
        places = [states.place[layer] for layer in self._layers]
        self._keep: list[Any] = []
        segments = (structs.StateSegment * len(batch.segments))()
        for native, segment in zip(segments, batch.segments, strict=True):
            states.prepare(segment)
            slot = segment.slot
            committed = min(segment.prefix, cache.lengths[slot])
            if (
                len({states.absorbed_LS[place][slot] for place in places}) > 1
            ):  # a forward was interrupted, or ran a span
                for layer in self._layers:
                    states.absorb(mixers[layer], slot, committed)
            begin = states.begin_S[slot]
            absorbed = states.absorbed_LS[places[0]][slot]
            native.pend, native.pending = absorbed - begin, committed - absorbed
            native.stored = segment.prefix - committed + segment.tail
            self._walk(native, segment, committed, states.taps)
        limited = next(iter(mixers.values())).limited
        rows = bytes(kind in limited for kind in kinds_of(batch))
        self._keep += [segments, rows]
        self.native = structs.States(
            slots=states.num_slots,
            capacity=states.capacity,
            base=states.base_LSHNP.data_ptr(),
            conv=states.conv_LSWC.data_ptr(),
            raw=states.raw_LSRC.data_ptr(),
            gates=states.gates_LSR2H.data_ptr(),
            limited=ctypes.cast(ctypes.c_char_p(rows), structs.P),
            segments=segments,
        )

    def done(self) -> None:
        """Record that every layer of the span has absorbed the committed rows."""
        cache, states = self._cache, self._cache.states
        for segment in self._batch.segments:
            committed = min(segment.prefix, cache.lengths[segment.slot])
            for layer in self._layers:
                place = states.place[layer]
                states.absorbed_LS[place][segment.slot] = committed
                if is_long(segment):
                    states.ahead[segment.slot].layers.add(place)

    def _walk(self, native: structs.StateSegment, segment: Segment, committed: int, taps: int) -> None:
        parents = parents_of(segment, committed)
        long = is_long(segment)
        steps, native.levels = depth_first(parents, keep_last=long)
        native.count = len(steps) // 3
        index = tap_index(parents, taps).to(torch.int32)
        self._keep += [steps, index]
        native.steps, native.taps = steps.buffer_info()[0], index.data_ptr()
        if long:
            ahead = self._cache.states.ahead[segment.slot]
            native.ahead_base, native.ahead_conv = ahead.base_LHNP.data_ptr(), ahead.conv_LWC.data_ptr()


def depth_first(parents: Sequence[int], *, keep_last: bool = False) -> tuple[array[int], int]:
    """Rows in the order of a walk: row, level of the state that it follows, level that it leaves; and how many levels.

    Args:
        parents: of each row; -1: the committed prefix, -2: the row is not walked.
        keep_last: also keep the state after the last row.
    """
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        if parent != -2:
            children.setdefault(parent, []).append(row)
    steps = array("i")
    level_of = {-1: -1}
    most = 0
    waiting = list(reversed(children.get(-1, [])))
    while waiting:
        row = waiting.pop()
        parent = parents[row]
        level = level_of[parent]
        if row not in children and not (keep_last and row == len(parents) - 1):
            steps.extend((row, level, -1))
            continue
        own = level if level >= 0 and children[parent][-1] == row else level + 1
        level_of[row] = own
        most = max(most, own + 1)
        steps.extend((row, level, own))
        waiting.extend(reversed(children.get(row, [])))
    return steps, most
