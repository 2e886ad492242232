"""The serial order: propose, forward, verify, commit. Every other executor must commit the same."""

from __future__ import annotations

from time import perf_counter

from foretoken.engine.executors.executor import Verbs
from foretoken.engine.executors.timeline import Timeline
from foretoken.engine.request import Request
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work


class SerialExecutor:
    """Runs a step's verbs one after the other, and records their durations.

    Attributes:
        timeline: records when each part was busy; None: no record.
    """

    name = "serial"

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def step(self, engine: Verbs) -> list[Request]:
        began = perf_counter()
        return self.run(engine, engine.schedule(), began).changed

    def run(self, engine: Verbs, work: Work, began: float) -> Round:
        """Run a step of scheduled work.

        Args:
            began: when scheduling began.
        """
        scheduled = perf_counter()
        drafts = engine.propose(work)
        drafted = perf_counter()
        current = engine.pack(work, drafts)
        if not current.jobs:
            return current
        packed = perf_counter()
        engine.forward(current)
        computed = perf_counter()
        engine.verify(current)
        current.touched = engine.commit(current)
        ended = perf_counter()
        engine.account(current, draft=drafted - scheduled, verify=computed - packed, total=ended - began)
        if self.timeline is not None:
            self.timeline.add("propose", scheduled, drafted)
            self.timeline.add("target", packed, computed)
            self.timeline.add("engine", computed, ended, current.num_tokens)
        return current

    def close(self) -> None:
        """Nothing to end: it has no threads."""
        return
