"""Drafter and target at the same time: while the target reads one draft, the drafter writes what may come behind it.

    lane      ── g a1 a2 ──────────────┐    ── g' b1 b2 ──────────────┐
    target    ── root, C ──────────────┤    ── g, a1 a2 ──────────────┤
                            decide, commit                 decide, commit

C is the draft that the target reads in a step; it may be empty. g a1 a2 … is what the drafter proposes meanwhile,
behind the last node of C. If all of C stands, the extra token is coupled to g (``Verifier.finish``): where it *is* g,
it is the next root and a1 a2 … the next C; else what was written ahead is dropped. With an empty C that is PEARL's
pre-verify (one token is tested while the block is being written), with a C of k nodes its post-verify: one step for
both, with the same propose, forward and verify as the serial order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.engine.executors.executor import Verbs
from foretoken.engine.executors.lane import Lane, split
from foretoken.engine.executors.overlap import Ahead, Shadow
from foretoken.engine.executors.timeline import Timeline
from foretoken.engine.request import Request
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work
from foretoken.native.team import Team


class OverlappedExecutor:
    """PEARL: the drafter drafts ahead on a lane of its own.

    Paper:   PEARL, arXiv:2408.11850, Algorithm 2 (pre-verify, post-verify).
    Exact:   what is committed has the law, and at temperature 0 the text, of the serial order: a draft is verified by
             the recipe's rule, and the guess behind it by a draw of the target's own law, with a fresh uniform.
    Differs: pre- and post-verify are one step, so requests of a batch are in either and none waits for a neighbour's
             miss. A step costs what the longer side costs: without a number of tokens the drafter writes until the
             target is done. One thread decides; the released code lets two processes draw the same numbers.

    Attributes:
        timeline: told who was busy when; None: nobody wants to know.

    The lane touches the drafter, and the draft streams of the requests, between ``begin`` and rest; nothing else may
    then. Between two steps it rests: requests join, end and are cancelled there.
    """

    name = "pearl"

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._pending: dict[tuple[int, int], Draft] = {}  # by request and its length: what hangs on its root
        self._lane: Lane | None = None
        self._team: Team | None = None

    def step(self, engine: Verbs) -> list[Request]:
        began = perf_counter()
        return self.run(engine, engine.schedule(), began).changed

    def run(self, engine: Verbs, work: Work, began: float) -> Round:
        """A step of which it is known who runs; it began when that was asked."""
        pending, self._pending = self._pending, {}  # an interrupted step leaves none: it is drafted again
        rooms = {each.request_id: room for each, room in zip(work.decoding, engine.room(work), strict=True)}
        drafts = [
            pending.get((each.request_id, len(each.tokens)), NO_DRAFT).part(0, rooms[each.request_id])
            for each in work.decoding
        ]
        current = engine.pack(work, drafts)  # before the order: a request that ends here is released at rest
        current.ahead = True
        if not current.jobs:
            return current
        shadows = [Shadow(job.request, job.draft) for job in current.jobs if not job.prompt]
        lane, team = self._places()
        lane.timeline = self.timeline
        packed = perf_counter()
        ticket = lane.begin(partial(engine.ahead, shadows, [rooms[each.request_id] for each in shadows]))
        try:
            with team:
                engine.forward(current)
            computed = perf_counter()
            ticket.stop()
            ahead = ticket.take()
        finally:
            ticket.rest()
        waited = perf_counter()
        engine.expect(current, shadows, ahead)
        engine.verify(current)
        current.touched = engine.commit(current)
        self._keep(current, {each.request_id: found for each, found in zip(shadows, ahead, strict=True)})
        ended = perf_counter()
        engine.account(current, draft=waited - computed, verify=computed - packed, total=ended - began)
        if self.timeline is not None:
            self.timeline.add("target", packed, computed)
            self.timeline.add("engine", waited, ended, current.num_tokens)
        return current

    def close(self) -> None:
        lane, self._lane, self._team, self._pending = self._lane, None, None, {}
        if lane is not None:
            lane.close()

    def _places(self) -> tuple[Lane, Team]:
        if self._lane is None or self._team is None:
            target, drafter = split()
            self._lane, self._team = Lane(drafter), Team(target)
        return self._lane, self._team

    def _keep(self, current: Round, ahead: Mapping[int, Ahead]) -> None:
        """Where the guess was right, what hangs on it is the next draft; everything else is forgotten, and counted."""
        for job in current.jobs:
            request = job.request
            found = ahead.get(request.request_id, NO_DRAFT)
            if job.guess is None or not isinstance(found, Draft):
                continue
            if job.guessed and not request.finished:
                self._pending[request.request_id, len(request.tokens)] = found.part(1)
            else:
                request.metrics.num_discarded_tokens += len(found) - 1
