"""The serial order: propose, forward, verify, commit. Every other executor must commit the same."""

from time import perf_counter

from foretoken.engine.executors.executor import Executor, Verbs
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work


class SerialExecutor(Executor):
    """Runs a step's verbs one after the other, and records their durations."""

    name = "serial"

    def run(self, engine: Verbs, work: Work, began: float) -> Round:
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
        engine.account(current, draft=drafted - scheduled, verify=computed - packed, total=perf_counter() - began)
        return current
