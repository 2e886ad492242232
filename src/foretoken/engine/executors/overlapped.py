"""PEARL: drafter and target at the same time. While the target reads one draft, the drafter writes the next one.

    drafter   ── g a1 a2 ──────────────┐    ── g' b1 b2 ──────────────┐
    target    ── root, C ──────────────┤    ── g, a1 a2 ──────────────┤
                            verify, commit                 verify, commit

C is the draft that the target reads in this step. The drafter continues after the last node of C, as if C were
accepted (``AssumedContext``), and writes the block g a1 a2 ...

    pre-verify    C is empty      the target's forward of the root tests g, the block's first token
    post-verify   C has k nodes   the target's forward tests C; if all of C is accepted, its extra token tests g

Where the extra token *is* g (``Verifier.finish`` couples them), g is the next root and a1 a2 ... the next C. Otherwise
the block is discarded, and the next step is a pre-verify. Both are one step here, with the same propose, forward and
verify as in the serial order.
"""

from collections.abc import Mapping
from functools import partial
from time import perf_counter

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.engine.executors.executor import Executor, Verbs
from foretoken.engine.executors.overlap import AssumedContext, DraftOrError
from foretoken.engine.executors.worker_thread import WorkerThread, split
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work
from foretoken.native.team import Team


class OverlappedExecutor(Executor):
    """Runs drafter and target at the same time, the drafter on a thread of its own.

    Paper:   PEARL, arXiv:2408.11850, Algorithm 2 (pre-verify, post-verify).
    Exact:   committed tokens have the distribution, and at temperature 0 the text, of the serial order: a draft is
             verified by the recipe's rule, and the block's first token by a draw from the target's own distribution,
             with a fresh uniform number.
    Differs: pre- and post-verify are one step, so requests of a batch are in either, and a rejection of one does not
             stall the others. A step takes as long as its longer side: without a configured number of tokens the
             drafter writes until the target has finished. One thread decides; the released code relies on two
             processes drawing the same numbers.

    While its task runs, only the drafter's thread may use the drafter and the draft streams of the requests. Between
    two steps it is idle; requests join, end and are cancelled then.
    """

    name = "pearl"

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Draft] = {}  # (request, its length) -> the draft of its next step
        self._drafter: WorkerThread | None = None
        self._team: Team | None = None  # native threads of the target

    def run(self, engine: Verbs, work: Work, began: float) -> Round:
        blocks, self._blocks = self._blocks, {}  # an interrupted step keeps no block: it is drafted again
        limits = {each.request_id: limit for each, limit in zip(work.decoding, engine.node_budgets(work), strict=True)}
        # C of each request: the rest of its block after a hit (post-verify), or empty (pre-verify)
        drafts = [
            blocks.get((each.request_id, len(each.tokens)), NO_DRAFT).part(0, limits[each.request_id])
            for each in work.decoding
        ]
        current = engine.pack(work, drafts)  # before drafting: a request that ends here is released while it is idle
        current.ahead = True
        if not current.jobs:
            return current
        contexts = [AssumedContext(job.request, job.draft) for job in current.jobs if not job.prompt]
        drafter, team = self._threads()
        packed = perf_counter()
        # the drafter writes g a1 a2 ... after C ...
        task = drafter.begin(partial(engine.ahead, contexts, [limits[each.request_id] for each in contexts]))
        try:
            with team:
                engine.forward(current)  # ... while the target reads root and C
            computed = perf_counter()
            task.stop()
            written = task.result()
        finally:
            task.stop_and_wait()
        waited = perf_counter()
        engine.expect(current, contexts, written)
        engine.verify(current)
        current.touched = engine.commit(current)
        self._keep(current, {each.request_id: found for each, found in zip(contexts, written, strict=True)})
        engine.account(current, draft=waited - computed, verify=computed - packed, total=perf_counter() - began)
        return current

    def close(self) -> None:
        drafter, self._drafter, self._team, self._blocks = self._drafter, None, None, {}
        if drafter is not None:
            drafter.close()

    def _threads(self) -> tuple[WorkerThread, Team]:
        if self._drafter is None or self._team is None:
            target, drafter = split()
            self._drafter, self._team = WorkerThread(drafter), Team(target)
        return self._drafter, self._team

    def _keep(self, current: Round, written: Mapping[int, DraftOrError]) -> None:
        """Keep a1 a2 ... as the next draft where g is the new root; discard and count all other blocks."""
        for job in current.jobs:
            request = job.request
            block = written.get(request.request_id, NO_DRAFT)
            if job.guess is None or not isinstance(block, Draft):
                continue
            if job.guessed and not request.finished:
                self._blocks[request.request_id, len(request.tokens)] = block.part(1)
            else:
                request.metrics.num_discarded_tokens += len(block) - 1
