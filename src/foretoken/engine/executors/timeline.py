"""Who was busy when: the intervals of a few steps, for a picture."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Interval:
    """``who`` worked from ``begin`` to ``end``, in seconds of ``time.perf_counter``."""

    who: str
    begin: float
    end: float


@dataclass(slots=True)
class Timeline:
    """Intervals in the order in which they were told."""

    intervals: list[Interval] = field(default_factory=list)

    def add(self, who: str, begin: float, end: float) -> None:
        """Take in one interval."""
        self.intervals.append(Interval(who, begin, end))
