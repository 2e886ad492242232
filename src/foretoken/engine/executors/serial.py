"""One thing after the other: propose, forward, verify, commit. What every other executor must be equal to."""

from __future__ import annotations

from time import perf_counter

from foretoken.engine.executors.executor import Verbs
from foretoken.engine.request import Request


class SerialExecutor:
    """Runs a step's verbs in their order, and says how long each took."""

    name = "serial"

    def step(self, engine: Verbs) -> list[Request]:
        began = perf_counter()
        work = engine.schedule()
        scheduled = perf_counter()
        drafts = engine.propose(work)
        drafted = perf_counter()
        current = engine.pack(work, drafts)
        if not current.jobs:
            return current.failed
        packed = perf_counter()
        engine.forward(current)
        computed = perf_counter()
        engine.verify(current)
        touched = engine.commit(current)
        engine.account(current, draft=drafted - scheduled, verify=computed - packed, total=perf_counter() - began)
        return current.failed + touched
