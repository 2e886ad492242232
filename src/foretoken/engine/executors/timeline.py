"""When target, drafter and engine were busy: the intervals of a few steps, for a picture."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Interval:
    """``actor`` worked from ``begin`` to ``end``, in seconds of ``time.perf_counter``.

    Attributes:
        actor: "target" (its forward), "drafter" (on its worker thread), "propose" (the engine's thread runs the
            drafter), "engine" (verify and commit).
        tokens: that a step added to decoding requests, for "engine".
    """

    actor: str
    begin: float
    end: float
    tokens: int = 0


@dataclass(slots=True)
class Timeline:
    """Intervals in the order in which they ended."""

    intervals: list[Interval] = field(default_factory=list)

    def add(self, actor: str, begin: float, end: float, tokens: int = 0) -> None:
        """Add one interval; any thread may call it."""
        self.intervals.append(Interval(actor, begin, end, tokens))
