"""When target, drafter and engine were busy: the intervals of a few steps, for a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.serial import SerialExecutor
from foretoken.engine.llm import LLM
from foretoken.engine.round import Round
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken.methods.dovetail.lanes import OnThread


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

    def timed(self, actor: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, which adds an interval when it ends."""

        def call(*given: Any) -> Any:
            begin = perf_counter()
            try:
                return work(*given)
            finally:
                self.add(actor, begin, perf_counter())

        return call


def watch(llm: LLM) -> Timeline | None:
    """Record what an engine does from now on; None for an executor of a user."""
    engine: Any = llm.engine
    drafter, timeline = llm.recipe.drafter, Timeline()
    if not isinstance(engine.executor, SerialExecutor | OverlappedExecutor):
        return None
    engine.propose, engine.forward = timeline.timed("propose", engine.propose), timeline.timed("target", engine.forward)
    engine.ahead = timeline.timed("drafter", engine.ahead)
    if isinstance(drafter, DovetailDrafter) and isinstance(drafter.lane, OnThread):
        lane: Any = drafter.lane
        begin = lane._begin
        lane._begin = lambda work: begin(timeline.timed("drafter", work))
    verify, commit, began = engine.verify, engine.commit, [0.0]

    def decide(current: Round) -> None:
        began[0] = perf_counter()
        verify(current)

    def keep(current: Round) -> Any:
        touched = commit(current)
        timeline.add("engine", began[0], perf_counter(), current.num_tokens)
        return touched

    engine.verify, engine.commit = decide, keep
    return timeline
