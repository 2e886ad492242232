"""One thread owns the engine; everybody else hands it orders and gets news.

    submit, cancel, drain ──► orders ──► [ engine's thread: orders, one step, news ] ──► one call a step into the
                                                                                         event loop of whoever asked

The engine's thread never waits for a reader: news of a request that nobody has read yet are joined, so that a slow
reader costs memory for its own text and nothing else.

What is told takes from the cores that compute: sending a piece and waking its reader is 0.1 to 0.2 ms, for each stream
and step. So streams have what is new of all of them together, 20 ms after the last time and 5 ms more for each other
stream, 50 ms at most; a step that lasts longer is told when it ends. First tokens and ends are told at once, and who
wants the whole is told these two.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from foretoken.core.errors import ForetokenError
from foretoken.engine.llm import LLM
from foretoken.engine.request import Request, TokenLogprob
from foretoken.engine.text.detokenise import TextStream

log = logging.getLogger(__name__)

_LOOK = 0.25  # seconds between two looks at deadlines
_PAUSE = 0.02  # seconds between two tellings of a stream alone
_PAUSE_MORE = 0.005  # for each stream beside the first
_LONGEST_PAUSE = 0.05  # about what a reader still sees as flowing
_LONGEST_WAIT = 60.0  # seconds that a client is asked to stay away, at most


class Overloaded(ForetokenError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which there may be room, estimated from what requests took.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopped(ForetokenError):
    """The loop takes no more requests: it is shutting down, or its engine has died."""


@dataclass(slots=True)
class Delta:
    """What is new of one completion.

    Attributes:
        index: which completion of the prompt.
        text: released text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens.
        drafted: for each of them, whether it was drafted (else the target wrote it).
        logprobs: one entry for each of them, if asked for.
        finish_reason: None while it runs; then "stop", "length", "cancelled" or "error".
        error: the message if it failed.
        unserved: whether the loop ended it, which was late, shutting down or dead.
        unfit: whether nothing can be written that is what it asks for.
    """

    index: int
    text: str
    token_ids: list[int]
    drafted: list[bool]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None
    error: str | None = None
    unserved: bool = False
    unfit: bool = False

    def join(self, later: Delta) -> None:
        """Take in what came after it."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.drafted += later.drafted
        self.logprobs += later.logprobs
        self.finish_reason, self.error = later.finish_reason, later.error
        self.unserved, self.unfit = later.unserved, later.unfit


class Ticket:
    """The completions of one prompt while they are under way. To be read in the event loop that submitted it.

    Attributes:
        requests: the engine's; they may be looked at once they are finished.
        streamed: whether its reader wants pieces; else completions, each when it has ended.
        submitted, first_token, ended: moments by ``time.monotonic``; None until then.
    """

    def __init__(
        self, requests: Sequence[Request], home: asyncio.AbstractEventLoop, deadline: float | None, *, streamed: bool
    ) -> None:
        self.requests = requests
        self.streamed = streamed
        self.home = home
        self.deadline = deadline
        self.submitted = monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        self._fresh: dict[int, Delta] = {}
        self._unfinished = len(requests)
        self._news = asyncio.Event()

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What is new, as soon as anything is: at most one delta a completion. Ends when all have."""
        while self._unfinished or self._fresh:
            await self._news.wait()
            self._news.clear()
            fresh, self._fresh = self._fresh, {}
            if fresh:
                yield [fresh[index] for index in sorted(fresh)]

    def take_in(self, delta: Delta) -> None:
        """Keep a delta for the reader, joined with what has not been read yet."""
        waiting = self._fresh.get(delta.index)
        if waiting is None:
            self._fresh[delta.index] = delta
        else:
            waiting.join(delta)
        now = monotonic()
        if delta.token_ids and self.first_token is None:
            self.first_token = now
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.ended = now
        if self.streamed or delta.finish_reason is not None:
            self._news.set()


@dataclass(slots=True)
class Totals:
    """Counters over all requests since the loop began; written by the engine's thread, read by anybody.

    Attributes:
        prompt_tokens, cached_tokens, tokens: of prompts, of these what was reused, and generated.
        steps: (request, step) pairs that emitted tokens.
        drafts, draft_tokens, accepted_tokens: what was drafted, and stood.
        accepted_at: how often a draft stood to this depth.
        ended: finish reason -> requests.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)

    def count_end(self, request: Request) -> None:
        """Count a request that has ended."""
        reason, metrics = request.finish_reason or "", request.metrics
        self.cached_tokens += request.num_cached
        self.ended[reason] = self.ended.get(reason, 0) + 1
        self.drafts += metrics.drafted_at[0] if metrics.drafted_at else 0
        self.accepted_at += [0] * (len(metrics.accepted_at) - len(self.accepted_at))
        for depth, count in enumerate(metrics.accepted_at):
            self.accepted_at[depth] += count


@dataclass(slots=True)
class _Run:
    """How far the news of one request have got.

    Attributes:
        sent, steps: tokens that its reader was told of, and the steps that emitted them.
        counted, counted_steps, drafted, accepted: tokens and steps that the totals have; what was drafted, and stood.
    """

    ticket: Ticket
    index: int
    request: Request
    sent: int = 0
    steps: int = 0
    counted: int = 0
    counted_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    unserved: bool = False


class EngineLoop:
    """Runs an ``LLM`` in a thread of its own.

    Args:
        llm: nobody else should run long jobs on it: they share its steps.
        max_queue: requests that may wait for a slot; more are refused.
        max_seconds: longest time of a request from submission to end; None: no limit.
    Attributes:
        totals: counters.
        failure: why the engine's thread died; None while it lives.
    """

    def __init__(self, llm: LLM, *, max_queue: int = 256, max_seconds: float | None = None) -> None:
        self.llm = llm
        self.max_queue = max_queue
        self.max_seconds = max_seconds
        self.totals = Totals()
        self.failure: BaseException | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._runs: dict[int, _Run] = {}
        self._open = 0  # requests that were submitted and have not ended
        self._mean_seconds = 1.0  # of a request, the last ones weighing most
        self._draining = False
        self._stopping = False
        self._looked = self._told = monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="foretoken-engine", daemon=True)

    # ------------------------------------------------------------------ for everybody

    def start(self) -> EngineLoop:
        """Begin to take requests."""
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether requests can run."""
        return self._thread.is_alive() and self.failure is None

    @property
    def accepting(self) -> bool:
        """Whether a request would be taken, if there is room."""
        return self.alive and not self._draining

    @property
    def _refusal(self) -> str:
        if self.failure:
            return f"the engine has died: {self.failure}"
        if self._draining:
            return "the server is shutting down"
        return "no thread of it runs in this process: make it after a fork, and start it"

    @property
    def capacity(self) -> int:
        """Requests that may run and wait at once."""
        return self.llm.max_num_seqs + self.max_queue

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self.llm.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return max(0, self._open - self.num_running)

    def submit(self, requests: Sequence[Request], *, streamed: bool = True) -> Ticket:
        """Queue the completions of one prompt. To be called in the event loop that will read the news.

        Args:
            requests: as ``LLM.new_requests`` makes them.
            streamed: whether pieces are wanted; else each completion is told when it has ended.
        Raises:
            Overloaded: too many wait already.
            Stopped: the loop takes no more.
        """
        deadline = None if self.max_seconds is None else monotonic() + self.max_seconds
        ticket = Ticket(requests, asyncio.get_running_loop(), deadline, streamed=streamed)
        for request in requests:
            if request.text is None:
                request.text = TextStream.of(self.llm.tokenizer, request.params, request.tokens)
        with self._changed:
            if not self.accepting:
                raise Stopped(self._refusal)
            if self._open >= self.capacity:
                rounds = self._open / self.llm.max_num_seqs
                raise Overloaded(
                    f"{self.num_waiting} requests wait already, and the queue holds {self.max_queue}: try again later",
                    min(_LONGEST_WAIT, max(1.0, rounds * self._mean_seconds)),
                )
            self._open += len(requests)
            self._orders.append(lambda: self._begin(ticket))
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what is left of a ticket before the next step; its reader gets nothing more of it."""
        if ticket.ended is None:
            self._order(lambda: self._cancel(ticket))

    def drain(self) -> None:
        """Take no more requests; those that run and wait go on."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def wait_until_idle(self, seconds: float | None) -> bool:
        """Wait until nothing runs or waits, so many seconds at most (None: as long as it takes); whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open or not self.alive, seconds)

    def close(self, seconds: float | None = 0.0) -> bool:
        """Drain, wait for the end of what runs, cancel what is left, and end the thread.

        Args:
            seconds: to wait, at most; None: as long as it takes.
        Returns:
            whether everything had ended by itself.
        """
        self.drain()
        done = self.wait_until_idle(seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        return done

    # ------------------------------------------------------------------ the engine's thread

    def _order(self, order: Callable[[], None]) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify()

    def _work(self) -> None:
        engine = self.llm.engine
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._orders or self._runs or self._stopping)
                    orders, self._orders = self._orders, deque()
                for order in orders:
                    order()
                if self._stopping:
                    break
                if self._runs:
                    engine.step()
                    self._tell()
                    self._end_what_is_late()
        except BaseException as error:
            log.exception("the engine's thread died")
            self.failure = error
        finally:
            reason = f"the engine has died: {self.failure}" if self.failure else "the server is shutting down"
            self._end([*self._runs.values()], reason)
            with self._changed:
                self._draining = True
                orders, self._orders = self._orders, deque()
            for order in orders:
                order()
            self._end([*self._runs.values()], reason)

    def _begin(self, ticket: Ticket) -> None:
        for index, request in enumerate(ticket.requests):
            self._runs[request.request_id] = _Run(ticket, index, request)
            self.llm.engine.add(request)
        self.totals.prompt_tokens += sum(request.num_prompt for request in ticket.requests)

    def _cancel(self, ticket: Ticket) -> None:
        self._end([self._runs[each.request_id] for each in ticket.requests if each.request_id in self._runs], None)

    def _end(self, runs: Sequence[_Run], error: str | None) -> None:
        for run in runs:
            self.llm.engine.cancel(run.request)
            if error is not None:
                run.request.error, run.request.finish_reason, run.unserved = error, "error", True
        self._tell()

    def _end_what_is_late(self) -> None:
        now = monotonic()
        if now < self._looked + _LOOK:
            return
        self._looked = now
        late = [run for run in self._runs.values() if run.ticket.deadline is not None and run.ticket.deadline < now]
        if late:
            self._end(late, f"the request took longer than {self.max_seconds:g} seconds")

    def _tell(self) -> None:
        """Hand what is new to the readers, in one call for each event loop.

        Requests are looked at instead of what a step returns: the step may have been another thread's, who uses the
        LLM beside the loop.
        """
        news: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Delta]]] = {}
        ended = 0
        with self.llm.engine.lock:  # tokens, text and end as of one moment
            for run in self._runs.values():
                if run.request.num_output > run.counted:
                    self._count(run)
            fresh = self._due()
            for run in fresh:
                news.setdefault(run.ticket.home, []).append((run.ticket, _delta(run)))
        for run in fresh:
            request = run.request
            if request.finish_reason is not None:
                ended += 1
                del self._runs[request.request_id]
                self.totals.count_end(request)
                self._mean_seconds += (request.metrics.seconds - self._mean_seconds) / 16
        if ended:
            with self._changed:
                self._open -= ended
                self._changed.notify_all()
        for home, items in news.items():
            try:
                home.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # that event loop is closed: nobody will read it
                for ticket, _ in items:
                    self._order(lambda ticket=ticket: self._cancel(ticket))  # type: ignore[misc]

    def _due(self) -> list[_Run]:
        """Those whose readers are told now: of a first token and an end at once, of the rest together with others."""
        new = [run for run in self._runs.values() if run.request.finished or run.request.num_output > run.sent]
        at_once = [run for run in new if run.request.finished or not run.sent]
        flowing = [run for run in new if run.ticket.streamed and run.sent and not run.request.finished]
        now = monotonic()
        if not flowing or now - self._told < min(_LONGEST_PAUSE, _PAUSE + _PAUSE_MORE * (len(flowing) - 1)):
            return at_once
        self._told = now
        return at_once + flowing

    def _count(self, run: _Run) -> None:
        """Add to the totals what is new of a request."""
        metrics, totals = run.request.metrics, self.totals
        steps = len(metrics.emitted)
        totals.steps += steps - run.counted_steps
        totals.tokens += run.request.num_output - run.counted
        totals.draft_tokens += metrics.num_draft_tokens - run.drafted
        totals.accepted_tokens += metrics.num_accepted_tokens - run.accepted
        run.counted, run.counted_steps = run.request.num_output, steps
        run.drafted, run.accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens


def _delta(run: _Run) -> Delta:
    """What its reader has not been told yet."""
    request = run.request
    assert request.text is not None
    tokens = request.tokens[request.num_prompt + run.sent :]
    if request.finished:
        request.text.close()
    steps = request.metrics.emitted[run.steps :]
    drafted = [place < step.drafted for step in steps for place in range(step.tokens)]  # the accepted path comes first
    drafted += [False] * (len(tokens) - len(drafted))  # a step that failed at its end
    logprobs = [] if request.logprobs is None else request.logprobs[run.sent :]
    run.sent += len(tokens)
    run.steps += len(steps)
    text = request.text.release(final=request.finished)
    ended = (request.finish_reason, request.error, run.unserved, request.unfit)
    return Delta(run.index, text, tokens, drafted, logprobs, *ended)


def _deliver(items: Sequence[tuple[Ticket, Delta]]) -> None:
    """In the reader's event loop."""
    for ticket, delta in items:
        ticket.take_in(delta)
