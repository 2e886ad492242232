"""The server's loop: one thread owns the engine; other threads submit orders and receive updates.

    submit, cancel, drain ──► orders ──► [ engine's thread: orders, one step, updates ] ──► one call a step into the
                                                                                            submitter's event loop

The engine's thread never waits for a reader: unread updates of a request are joined, so a slow reader costs memory for
its own text only.

Delivery takes time on the cores that compute: 0.1 to 0.2 ms for each stream and step. The loop therefore delivers the
updates of all streams together: the interval is 20 ms for one stream, plus 5 ms for each further stream, at most 50 ms.
First tokens and ends are delivered at once; a reader of the whole answer gets only these two.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from time import monotonic

from foretoken.core.errors import ForetokenError
from foretoken.engine.drive import Driver
from foretoken.engine.llm import LLM
from foretoken.engine.request import Request
from foretoken.engine.totals import Totals
from foretoken.engine.updates import Tracked, Update

log = logging.getLogger(__name__)

_LOOK = 0.25  # seconds between two checks of deadlines
_PAUSE = 0.02  # seconds between two updates of a single stream
_PAUSE_MORE = 0.005  # for each further stream
_LONGEST_PAUSE = 0.05  # text still seems to flow
_LONGEST_WAIT = 60.0  # maximum Retry-After in seconds


class Overloaded(ForetokenError):
    """The queue is full.

    Attributes:
        retry_after: seconds until a slot is likely to be free, estimated from the duration of requests.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopped(ForetokenError):
    """The loop accepts no more requests: it is shutting down, or its engine has failed."""


class Ticket:
    """The completions of one prompt while they run. Read it in the event loop that submitted it.

    Attributes:
        requests: the engine's requests; read them only when they are finished.
        streamed: whether the reader receives pieces; else it receives each completion when it ends.
        submitted, first_token, ended: times from ``time.monotonic``; None until then.
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
        self._fresh: dict[int, Update] = {}
        self._unfinished = len(requests)
        self._news = asyncio.Event()

    async def deltas(self) -> AsyncGenerator[list[Update], None]:
        """Yield updates, at most one per completion at a time. Ends when all completions have ended."""
        while self._unfinished or self._fresh:
            await self._news.wait()
            self._news.clear()
            fresh, self._fresh = self._fresh, {}
            if fresh:
                yield [fresh[index] for index in sorted(fresh)]

    def take_in(self, update: Update) -> None:
        """Store an update for the reader, joined with the unread ones."""
        waiting = self._fresh.get(update.index)
        if waiting is None:
            self._fresh[update.index] = update
        else:
            waiting.join(update)
        now = monotonic()
        if update.token_ids and self.first_token is None:
            self.first_token = now
        if update.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.ended = now
        if self.streamed or update.finish_reason is not None:
            self._news.set()


class EngineLoop:
    """Runs an ``LLM`` in a thread of its own.

    Args:
        llm: the model. Other long jobs on it would share its steps.
        max_queue: maximum number of waiting requests; more are refused.
        max_seconds: maximum time from submission to end of a request; None: no limit.
        totals: counters that continue, when a model is loaded again; None: new ones.
    Attributes:
        totals: counters.
        failure: the error that ended the engine's thread; None while it runs.
    """

    def __init__(
        self, llm: LLM, *, max_queue: int = 256, max_seconds: float | None = None, totals: Totals | None = None
    ) -> None:
        self.llm = llm
        self.max_queue = max_queue
        self.max_seconds = max_seconds
        self.totals = totals or Totals()
        self._driver = Driver(llm.engine, llm.max_num_seqs, self.totals)
        self.failure: BaseException | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._runs: dict[int, Tracked] = {}  # by request id, like the tickets
        self._tickets: dict[int, Ticket] = {}
        self._open = 0  # submitted requests that have not ended
        self._mean_seconds = 1.0  # seconds per request, a moving average
        self._draining = False
        self._stopping = False
        self._looked = self._delivered = monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="foretoken-engine", daemon=True)

    # ------------------------------------------------------------------ for any thread

    def start(self) -> "EngineLoop":
        """Start the engine's thread."""
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether requests can run."""
        return self._thread.is_alive() and self.failure is None

    @property
    def accepting(self) -> bool:
        """Whether a request would be accepted, if the queue has a place."""
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
        """Maximum number of running and waiting requests."""
        return self.llm.max_num_seqs + self.max_queue

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        return len(self.llm.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return max(0, self._open - self.num_running)

    def submit(self, requests: Sequence[Request], *, streamed: bool = True) -> Ticket:
        """Queue the completions of one prompt. Call it in the event loop that reads the updates.

        Args:
            requests: from ``LLM.new_requests``.
            streamed: whether to deliver pieces; else each completion is delivered when it ends.
        Raises:
            Overloaded: the queue is full.
            Stopped: the loop accepts no more requests.
        """
        deadline = None if self.max_seconds is None else monotonic() + self.max_seconds
        ticket = Ticket(requests, asyncio.get_running_loop(), deadline, streamed=streamed)
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
        """Cancel a ticket's unfinished requests before the next step; its reader gets no more updates."""
        if ticket.ended is None:
            self._order(lambda: self._cancel(ticket))

    def drain(self) -> None:
        """Accept no more requests; running and waiting requests continue."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def wait_until_idle(self, seconds: float | None) -> bool:
        """Wait until no request runs or waits, at most ``seconds`` (None: no limit); return whether it is idle."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open or not self.alive, seconds)

    def close(self, seconds: float | None = 0.0) -> bool:
        """Drain, wait for running requests, cancel the remaining ones, and end the thread.

        Args:
            seconds: maximum time to wait; None: no limit.
        Returns:
            whether all requests ended without cancellation.
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
                    self._driver.step()
                    self._deliver()
                    self._end_overdue()
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
        for each in self._driver.begin(ticket.requests, streamed=True):
            self._runs[each.request.request_id] = each
            self._tickets[each.request.request_id] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        self._end([self._runs[each.request_id] for each in ticket.requests if each.request_id in self._runs], None)

    def _end(self, runs: Sequence[Tracked], error: str | None) -> None:
        for run in runs:
            self._driver.cancel(run)
            if error is not None:
                run.request.error, run.request.finish_reason, run.unserved = error, "error", True
        self._deliver()

    def _end_overdue(self) -> None:
        now = monotonic()
        if now < self._looked + _LOOK:
            return
        self._looked = now
        deadlines = {request_id: ticket.deadline for request_id, ticket in self._tickets.items()}
        late = [run for key, run in self._runs.items() if (limit := deadlines[key]) is not None and limit < now]
        if late:
            self._end(late, f"the request took longer than {self.max_seconds:g} seconds")

    def _deliver(self) -> None:
        """Deliver updates to the readers, in one call for each event loop."""
        by_home: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Update]]] = {}
        ended = 0
        for run, update in self._driver.news(self._runs.values(), self._due):
            key = run.request.request_id
            ticket = self._tickets[key]
            by_home.setdefault(ticket.home, []).append((ticket, update))
            if update.finish_reason is not None:
                ended += 1
                del self._runs[key], self._tickets[key]
                self._mean_seconds += (run.request.metrics.seconds - self._mean_seconds) / 16
        if ended:
            with self._changed:
                self._open -= ended
                self._changed.notify_all()
        for home, items in by_home.items():
            try:
                home.call_soon_threadsafe(_take_in, items)
            except RuntimeError:  # that event loop is closed: it has no readers
                for ticket, _ in items:
                    self._order(lambda ticket=ticket: self._cancel(ticket))  # type: ignore[misc]

    def _due(self, fresh: list[Tracked]) -> list[Tracked]:
        """Select the updates to deliver now: first tokens and ends at once, the others together."""
        at_once = [run for run in fresh if run.request.finished or not run.num_read]
        flowing = [
            run
            for run in fresh
            if run.num_read and not run.request.finished and self._tickets[run.request.request_id].streamed
        ]
        now = monotonic()
        if not flowing or now - self._delivered < min(_LONGEST_PAUSE, _PAUSE + _PAUSE_MORE * (len(flowing) - 1)):
            return at_once
        self._delivered = now
        return at_once + flowing


def _take_in(items: Sequence[tuple[Ticket, Update]]) -> None:
    """Store the updates; runs in the reader's event loop."""
    for ticket, update in items:
        ticket.take_in(update)
