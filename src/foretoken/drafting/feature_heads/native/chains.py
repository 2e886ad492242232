"""Several passes of chains as one native call (chain.h): each pass reads the output of the one before it.

Which drafts go on is predicted (:class:`Prefetch`), and decided afterwards by the drafter: a pass that was not needed
is dropped, and one that is missing is computed by another call. Every pass has the bits that it has alone.

Letters: M wanted rows, W width, C columns of the head.
"""

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from foretoken.native import structs
from foretoken.native.call import OpenCall, Ranked
from foretoken.native.declared import Header, function
from foretoken.native.team import Team

_HEADER = Header(Path(__file__).with_name("chain.h"))


class Entry(ctypes.Structure):
    """How pairs of a feature and a token enter."""

    _fields_ = _HEADER.fields("Entry", structs.Matrix)


class Chain(ctypes.Structure):
    """Passes over pairs."""

    _fields_ = _HEADER.fields("Chain", structs.Call, structs.Segment)


class Prefetch(NamedTuple):
    """How many passes of a draft one call computes.

    Attributes:
        most: passes at most, this one included.
        stands, first, later, free: when it goes on before that; see core/stop_rule.py, Outlook.
        temperature: of the distribution that its tokens are drawn from; 0: the best ones are taken.
        uniforms: random numbers for these draws, two for each pass but the last one (Streams.foreseen).
    """

    most: int
    stands: Sequence[float]
    first: float
    later: float
    free: int
    temperature: float = 0.0
    uniforms: Sequence[float] = ()


class Pass(NamedTuple):
    """One pass.

    Attributes:
        ranked: of its wanted rows; no hidden states.
        following_MW: the features that follow them, float32; where tokens enter by themselves [M, 0].
        drafts: of each row, the wanted row of the first pass that it goes on from.
        tokens: that were read; of a first pass none, for they were given.
    """

    ranked: Ranked
    following_MW: Tensor
    drafts: Sequence[int]
    tokens: Sequence[int]


class OpenChain:
    """Passes that are ready but for their input.

    Args:
        call: the first pass, with memory for the results of all.
        wanted: M.
        count: passes at most.
        prefetch: of each segment, or none for one pass.
        ids_C: int32, the tokens that the head's columns stand for; None: column i is token i.
        stride: of a row of logits.
    Attributes:
        native: the description.
    """

    def __init__(
        self, call: OpenCall, wanted: int, count: int, prefetch: Sequence[Prefetch], ids_C: Tensor | None, stride: int
    ) -> None:
        self._call, self._wanted = call, wanted
        self._counts, self._drafts, self._read = (
            array("q", bytes(8 * count)),
            array("i", bytes(4 * count * wanted)),
            array("i", bytes(4 * count * wanted)),
        )
        most, free = array("i", [each.most for each in prefetch]), array("i", [each.free for each in prefetch])
        stands = array("d", [share for each in prefetch for share in each.stands])
        least = array("d", [number for each in prefetch for number in (each.first, each.later)])
        reach, own_rows = array("d", [1.0] * wanted), array("i", range(wanted))
        temperature, uniforms, weights = array("d", [each.temperature for each in prefetch]), array("d"), array("f")
        if any(temperature):
            weights = array("f", bytes(4 * stride))
            for each in prefetch:
                uniforms.extend(each.uniforms)
                uniforms.extend([0.0] * (2 * count - len(each.uniforms)))
        next_segments, next_positions = (structs.Segment * wanted)(), array("i", bytes(4 * wanted))
        self._held = (most, free, stands, least, reach, own_rows, temperature, uniforms, weights, next_positions, ids_C)
        self.native = Chain(
            first=ctypes.pointer(call.native),
            passes=count,
            most=most.buffer_info()[0],
            ids=None if ids_C is None else ids_C.data_ptr(),
            tenths=len(prefetch[0].stands) if prefetch else 0,
            stands=stands.buffer_info()[0],
            least=least.buffer_info()[0],
            free=free.buffer_info()[0],
            reach=reach.buffer_info()[0],
            temperature=temperature.buffer_info()[0],
            uniforms=uniforms.buffer_info()[0],
            weights=weights.buffer_info()[0] if weights else None,
            segments=next_segments,
            positions=next_positions.buffer_info()[0],
            rows=own_rows.buffer_info()[0],
            counts=self._counts.buffer_info()[0],
            drafts=self._drafts.buffer_info()[0],
            tokens=self._read.buffer_info()[0],
        )

    def run(self, library: ctypes.CDLL, team: Team, model: structs.Model, entry: Entry) -> None:
        """Make them.

        Raises:
            MemoryError: there is no memory for the first pass.
        """
        handle = team.handle(library)  # held while the call runs
        run = function(library, "foretoken_chain", *[structs.P] * 4)
        if run(handle.address, ctypes.addressof(model), ctypes.addressof(entry), ctypes.addressof(self.native)):
            raise MemoryError(f"there is no memory for a forward of {self._call.native.num_rows} rows")

    def passes(self, vocab_size: int, following_MW: Tensor) -> list[Pass]:
        """The computed passes: the first one and those after it; there may be fewer than planned.

        Args:
            vocab_size: of the head that was read.
            following_MW: of all passes, one after the other.
        """
        if self.native.passes == 1:
            return [Pass(self._call.ranked(vocab_size, {}), following_MW, self._drafts, ())]
        made = []
        for number in range(self.native.made):
            begin = number * self._wanted
            end = begin + self._counts[number]
            ranked = self._call.ranked_between(begin, end, vocab_size)
            features_MW = following_MW[begin:end]
            made.append(Pass(ranked, features_MW, self._drafts[begin:end], self._read[begin:end] if number else ()))
        return made
