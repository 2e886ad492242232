"""Who was busy when: the intervals of a few steps, for a picture."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Interval:
    """``who`` worked from ``begin`` to ``end``, in seconds of ``time.perf_counter``.

    Attributes:
        who: "target" (its forward), "drafter" (on a lane of its own), "propose" (the engine's thread asks the drafter,
            and waits for it), "engine" (it decides and commits).
        tokens: that a step gave to those who decode, of its "engine".
    """

    who: str
    begin: float
    end: float
    tokens: int = 0


@dataclass(slots=True)
class Timeline:
    """Intervals in the order in which they ended."""

    intervals: list[Interval] = field(default_factory=list)

    def add(self, who: str, begin: float, end: float, tokens: int = 0) -> None:
        """Take in one interval; any thread may tell it."""
        self.intervals.append(Interval(who, begin, end, tokens))
