"""Lengths to which a slot can be rolled back: copies of its states at these lengths.

States cannot be shortened, so a prefix that others are going to begin with has to be marked while a slot stands at its
end. Copies are large, so all of them together are bounded, and those that were used least recently are forgotten first.

Letters: L mixers, H heads, N state size, P head width, W taps, C channels, R rows of a tail.
"""

import itertools
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Mark:
    """Copies of a slot's states after some number of committed tokens.

    Attributes:
        length: those tokens.
        begin, absorbed_L, base_LHNP, conv_LWC, raw_LRC, gates_LR2H: as in the cache (state.py); copies.
        used: when it was made or gone back to last, as a number that grows.
    """

    length: int
    begin: int
    absorbed_L: list[int]
    base_LHNP: Tensor
    conv_LWC: Tensor
    raw_LRC: Tensor
    gates_LR2H: Tensor
    used: int = field(default=0, init=False)

    def reaches(self, length: int) -> bool:
        """Whether a slot with this can be rolled back to so many tokens."""
        return max(self.absorbed_L) <= length <= self.length

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.base_LHNP, self.conv_LWC, self.raw_LRC, self.gates_LR2H))


class Marks:
    """Those of all slots; a fork shares its origin's."""

    def __init__(self) -> None:
        self._of_slot: dict[int, list[Mark]] = {}
        self._moments = itertools.count()

    @property
    def num_bytes(self) -> int:
        """Bytes of all marks; a shared mark counts once."""
        return sum(mark.num_bytes for mark in self._every())

    def is_at(self, slot: int, length: int) -> bool:
        """Whether the slot is marked there."""
        return any(mark.length == length for mark in self._of_slot.get(slot, ()))

    def add(self, slot: int, mark: Mark, max_bytes: int) -> None:
        """Keep a mark of a slot.

        Args:
            max_bytes: of all marks; those that were used least recently are forgotten until the others fit.
        """
        mark.used = next(self._moments)
        self._of_slot.setdefault(slot, []).append(mark)
        held = self.num_bytes
        for oldest in sorted(self._every(), key=lambda each: each.used):
            if held <= max_bytes:
                return
            held -= oldest.num_bytes
            for marks in self._of_slot.values():
                marks[:] = [each for each in marks if each is not oldest]

    def reachable(self, slot: int, length: int) -> int:
        """The longest length up to ``length`` that one of the slot's marks reaches; 0: none does."""
        lengths = ((min(length, mark.length), mark) for mark in self._of_slot.get(slot, ()))
        return max((each for each, mark in lengths if mark.reaches(each)), default=0)

    def to(self, slot: int, length: int) -> Mark | None:
        """A mark of the slot that reaches there; it counts as used."""
        found = next((mark for mark in self._of_slot.get(slot, ()) if mark.reaches(length)), None)
        if found is not None:
            found.used = next(self._moments)
        return found

    def cut(self, slot: int, length: int) -> None:
        """Forget the slot's marks beyond so many tokens."""
        marks = self._of_slot.get(slot, [])
        marks[:] = [mark for mark in marks if mark.length <= length]

    def share(self, slot: int, twin: int) -> None:
        """Share the marks of a slot with its fork."""
        self._of_slot[twin] = list(self._of_slot.get(slot, ()))

    def forget(self, slot: int) -> None:
        """Forget all of a slot's."""
        self._of_slot.pop(slot, None)

    def _every(self) -> list[Mark]:
        return list({id(mark): mark for marks in self._of_slot.values() for mark in marks}.values())
