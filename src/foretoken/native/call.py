"""One native forward: the description of its inputs and outputs for native code, and their memory.

Letters: M wanted rows, V vocabulary, D width.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.span import Span
from foretoken.native import structs
from foretoken.native.cache_addresses import CacheAddresses
from foretoken.native.rotary import Tables


@dataclass(frozen=True, slots=True)
class Ranked:
    """Results of a native forward; see models/language_model.py, Output."""

    logits_MV: Tensor
    best: array[int]
    peaks: array[float]
    top_ids: array[int]
    top_shares: array[float]
    hidden: dict[int, Tensor]


class Angles(NamedTuple):
    """Rotary angles for native code, and the tables that they point to."""

    native: ctypes.Array[structs.Angles]
    tables: list[Tables]


class OpenCall:
    """A forward that is ready but for its optional parts; its inputs were checked before (checks.py).

    Args:
        batch, cache, span: of the forward.
        addresses: the cache's buffers; None: no layer is run.
        angles: as many positions as the rows have.
        logits_MV: memory for the wanted rows' logits, padded as the head is. A multiple of these rows holds the logits
            of further forwards of the same rows.
        width: D.
        top: how many tokens of each wanted row to rank.
        threads: that compute it.

    Attributes:
        native: the description.
        segments: of the batch.
        tapped: [taps, tapped rows, D] of this forward, and of those after it.
    """

    def __init__(
        self,
        batch: PackedBatch,
        cache: KVCache,
        span: Span,
        *,
        addresses: CacheAddresses | None,
        angles: Angles,
        logits_MV: Tensor,
        width: int,
        top: int,
        threads: int,
    ) -> None:
        num_rows, num_wanted, results = len(batch.tokens), len(batch.wanted), len(logits_MV)
        self.segments = (structs.Segment * len(batch.segments))()
        for native, segment in zip(self.segments, batch.segments, strict=True):
            native.slot, native.prefix, native.tail = segment.slot, segment.prefix, segment.tail
            native.start, native.rows = segment.start, segment.num_rows
            native.committed = 0 if addresses is None else min(segment.prefix, cache.lengths[segment.slot])
            if segment.seen is not None:
                native.seen = segment.seen.data_ptr()
        tokens, positions, wanted = array("i", batch.tokens), array("i", batch.positions), array("i", batch.wanted)
        taps = array("q", span.taps)
        tap_rows = array("i", range(num_rows) if span.tap_rows is None else span.tap_rows)
        forwards = results // num_wanted if num_wanted else 1
        self.tapped = torch.empty(len(taps), forwards * len(tap_rows), width)
        entering_TD = None if span.entering_TD is None else span.entering_TD.to(torch.float32).contiguous()
        self._logits_MV, self._top = logits_MV, top
        self._best, self._peaks = array("i", bytes(4 * results)), array("f", bytes(4 * results))
        self._ids, self._shares = array("i", bytes(4 * results * top)), array("f", bytes(4 * results * top))
        self._held = (batch, tokens, positions, wanted, addresses, angles, taps, tap_rows, entering_TD)
        self.native = structs.Call(
            num_rows=num_rows,
            num_segments=len(self.segments),
            num_wanted=num_wanted,
            capacity=cache.capacity,
            threads=threads,
            coded=int(cache.coded),
            bf16_kv=int(cache.kv_dtype == torch.bfloat16),
            tokens=tokens.buffer_info()[0],
            positions=positions.buffer_info()[0],
            wanted=wanted.buffer_info()[0],
            angles=angles.native,
            segments=self.segments,
            logits=logits_MV.data_ptr(),
            best=self._best.buffer_info()[0],
            peaks=self._peaks.buffer_info()[0],
            top=top,
            top_ids=self._ids.buffer_info()[0],
            top_shares=self._shares.buffer_info()[0],
            first=span.first,
            last=span.last,
            entering=None if entering_TD is None else entering_TD.data_ptr(),
            skip_norm=int(not span.final_norm),
            num_taps=len(taps),
            num_tap_rows=len(tap_rows),
            taps=taps.buffer_info()[0],
            tap_rows=tap_rows.buffer_info()[0],
            tapped=self.tapped.data_ptr(),
        )
        if addresses is not None:
            self.native.keys, self.native.values = ctypes.addressof(addresses.keys), ctypes.addressof(addresses.values)
            self.native.tiled, self.native.known = ctypes.addressof(addresses.tiled), ctypes.addressof(addresses.known)

    def ranked(self, vocab_size: int, hidden: dict[int, Tensor]) -> Ranked:
        """Results of all wanted rows.

        Args:
            vocab_size: V, without the head's padding.
            hidden: tapped hidden states, by depth.
        """
        return Ranked(self._logits_MV[:, :vocab_size], self._best, self._peaks, self._ids, self._shares, hidden)

    def ranked_between(self, begin: int, end: int, vocab_size: int) -> Ranked:
        """Results of the wanted rows begin to end - 1: those of one of several forwards."""
        ranked = slice(begin * self._top, end * self._top)
        return Ranked(
            self._logits_MV[begin:end, :vocab_size],
            self._best[begin:end],
            self._peaks[begin:end],
            self._ids[ranked],
            self._shares[ranked],
            {},
        )
