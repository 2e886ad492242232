"""Where the drafting side (remote_head.py) runs: in the engine's thread, in a worker thread, or in another process.

    verbs    read       send rows to the drafting side, which may read them while the target computes
             draft      send rows, and wait for drafts after them
             forget     drop a request that has ended, after the orders before it

The engine's thread and a worker thread use the same side object; a worker thread has exclusive access while it
executes an order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from foretoken.core.draft import Draft
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Context
from foretoken.drafting import process
from foretoken.drafting.process import HelperProcess
from foretoken.engine.executors.worker_thread import Task, WorkerThread
from foretoken.methods.dovetail.remote_head import Newcomer, Order, Parcel, RemoteHead, bytes_back, draft_of, packed
from foretoken.methods.dovetail.staging import Staging
from foretoken.options.sampling import SamplingParams

_READING = 0.01  # additional timeout in seconds for every token that the helper reads
HERE, THREAD, PROCESS = "here", "thread", "process"
_Result = TypeVar("_Result")
PLACES = (HERE, THREAD, PROCESS)


class Asked(Context, Protocol):
    """The fields of a request that are sent to a process."""

    @property
    def history_only(self) -> bool: ...

    @property
    def params(self) -> SamplingParams: ...


class InPlace:
    """The drafting side in the engine's thread, on the target's device or on another.

    Args:
        staging: transfers the states; None: same device and dtype, no transfer.
    Attributes:
        concurrent: whether it reads while the target computes.
        bytes_moved: bytes transferred between target and drafting side so far, both ways.
    """

    concurrent = False

    def __init__(self, remote_head: RemoteHead, staging: Staging | None) -> None:
        self.remote_head, self._staging = remote_head, staging
        self.bytes_moved = 0

    def ready(self) -> bool:
        """Whether it can draft now; if not, rows stay queued."""
        return True

    def read(self, parcels: Sequence[Parcel]) -> None:
        if self._staging is None:
            self.remote_head.take(parcels)
            return
        self.bytes_moved += sum(each.num_bytes for each in parcels)
        staged = self._staging.put([each.states_TW for each in parcels])
        self.remote_head.take(taken(parcels, staged.take()))

    def draft(self, parcels: Sequence[Parcel], contexts: Sequence[Asked], budgets: Sequence[Budget]) -> list[Draft]:
        """Return a draft for each context; of another lane None: the drafting side was lost, with the rows it read."""
        self.read(parcels)
        drafts = self.remote_head.propose(contexts, budgets)
        if self._staging is not None:
            self.bytes_moved += sum(map(bytes_back, drafts))
        return drafts

    def forget(self, request_id: int) -> None:
        self.remote_head.release(request_id)

    def close(self) -> None:
        return


class OnThread:
    """The drafting side on a worker thread, with its own native threads."""

    concurrent = True

    def __init__(self, remote_head: RemoteHead, staging: Staging, threads: int) -> None:
        self.remote_head, self._staging = remote_head, staging
        self._threads = threads
        self._lane: WorkerThread | None = None
        self._reading: list[Task[None]] = []
        self.bytes_moved = 0

    def ready(self) -> bool:
        return True

    def read(self, parcels: Sequence[Parcel]) -> None:
        self._reading.append(self._begin(self._work(parcels)))

    def draft(self, parcels: Sequence[Parcel], contexts: Sequence[Asked], budgets: Sequence[Budget]) -> list[Draft]:
        take = self._work(parcels)

        def work(stopped: Callable[[], bool]) -> list[Draft]:
            take(stopped)
            return self.remote_head.propose(contexts, budgets)

        task = self._begin(work)
        try:
            reading, self._reading = self._reading, []
            for each in reading:
                each.result()  # raises the error of a failed task
            drafts = task.result()
        finally:
            task.stop_and_wait()
        self.bytes_moved += sum(map(bytes_back, drafts))
        return drafts

    def forget(self, request_id: int) -> None:
        self._reading.append(self._begin(lambda stopped: self.remote_head.release(request_id)))

    def close(self) -> None:
        lane, self._lane = self._lane, None  # the next order starts a new lane
        if lane is not None:
            lane.close()

    def _begin(self, work: Callable[[Callable[[], bool]], _Result]) -> Task[_Result]:
        if self._lane is None:
            self._lane = WorkerThread(self._threads)
        return self._lane.begin(work)

    def _work(self, parcels: Sequence[Parcel]) -> Callable[[Callable[[], bool]], None]:
        """Return the lane's task for rows; the rows stay in a buffer until then."""
        if not parcels:
            return lambda stopped: None
        self.bytes_moved += sum(each.num_bytes for each in parcels)
        staged = self._staging.put([each.states_TW for each in parcels])
        return lambda stopped: self.remote_head.take(taken(parcels, staged.take()))


class InProcess:
    """The drafting side in a helper process, or in this process after the second loss of a helper.

    A helper that ends or does not answer in time is replaced once. Requests with rows that the helper had read get no
    more drafts, because their states are not kept; later requests do. A second loss moves drafting to this process.

    Args:
        make, arguments: see :class:`HelperProcess`.
        here: makes the replacement lane.
        forgotten: called when the rows of a helper are lost.
    Raises:
        ConfigError: the helper fails to start.
    """

    concurrent = True

    def __init__(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        here: Callable[[], InPlace],
        forgotten: Callable[[], None],
        threads: int,
    ) -> None:
        self._here, self._forgotten = here, forgotten
        self._instead: InPlace | None = None
        self._met: set[int] = set()
        self._gone: list[int] = []
        self.helper = HelperProcess(
            make,
            arguments,
            purpose="which drafts for method 'dovetail'",
            without="drafts are written in this process from now on",
            forget=self._forget,
            threads=threads,
        )
        if not self.helper.started(process.STARTING):
            self.helper.close()
            raise ConfigError("place='process': the helper did not start: see its messages above, or use place='here'")

    @property
    def bytes_moved(self) -> int:
        moved = self.helper.bytes_sent + self.helper.bytes_received
        return moved if self._instead is None else moved + self._instead.bytes_moved

    def ready(self) -> bool:
        if self._instead is not None:
            return True
        if self.helper.ready():
            return True
        if self.helper.pid is None:
            self._instead = self._here()
        return self._instead is not None

    def read(self, parcels: Sequence[Parcel]) -> None:
        if self._instead is not None:
            self._instead.read(parcels)
        else:
            self.helper.tell(self._order(parcels, (), ()))

    def draft(
        self, parcels: Sequence[Parcel], contexts: Sequence[Asked], budgets: Sequence[Budget]
    ) -> list[Draft] | None:
        if self._instead is not None:
            return self._instead.draft(parcels, contexts, budgets)
        order = self._order(parcels, contexts, budgets)
        reading = sum(len(each.tokens) for each in parcels)
        found = self.helper.ask(order, more_seconds=_READING * reading)
        if isinstance(found, Exception):
            raise found
        return None if found is None else [draft_of(*each) for each in found]

    def forget(self, request_id: int) -> None:
        if self._instead is not None:
            self._instead.forget(request_id)
        else:
            self._met.discard(request_id)
            self._gone.append(request_id)

    def close(self) -> None:
        self.helper.close()

    def _order(self, parcels: Sequence[Parcel], contexts: Sequence[Asked], budgets: Sequence[Budget]) -> Order:
        new = [each for each in contexts if each.request_id not in self._met]
        self._met.update(each.request_id for each in new)
        gone, self._gone = tuple(self._gone), []
        return Order(
            self.helper.next_number(),
            tuple(map(packed, parcels)),
            tuple(
                Newcomer(
                    each.request_id, each.num_prompt, each.params, each.streams.seed, each.stop_ids, each.history_only
                )
                for each in new
            ),
            tuple((context.request_id, budget) for context, budget in zip(contexts, budgets, strict=True)),
            gone,
        )

    def _forget(self) -> None:
        self._met.clear()
        self._gone.clear()
        self._forgotten()


DraftLane = InPlace | OnThread | InProcess
"""A connection to the drafting side; each has the attributes and methods of :class:`InPlace`."""


def taken(parcels: Sequence[Parcel], states: Sequence[Any]) -> list[Parcel]:
    """Return the parcels with the states as they arrived."""
    return [replace(parcel, states_TW=each) for parcel, each in zip(parcels, states, strict=True)]
