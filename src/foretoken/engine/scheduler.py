"""Select the requests of the next step: they join and leave at every step, within a budget of rows.

Every running request gets one row (its root) before any gets draft rows; chunks of prompts get rows that are left, so a
long prompt never stops the others. Waiting requests join in order of arrival as soon as a slot is free. If several
prompts arrive at once, the first is answered before the last is read, unless reading them together is faster.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from foretoken.engine.prefixes import Prefixes
from foretoken.engine.request import Request
from foretoken.forward.cache import KVCache


@dataclass(slots=True)
class Work:
    """One step's work.

    Attributes:
        decoding: requests after their prompt; each needs its root row.
        prefill: (request, number of prompt rows to process now).
        spare_rows: rows left in the budget for drafts.
        failed: requests that ended with an error before the forward.
        queued: whether other requests wait for a slot.
    """

    decoding: list[Request]
    prefill: list[tuple[Request, int]]
    spare_rows: int
    failed: list[Request] = field(default_factory=list)
    queued: bool = False


class Scheduler:
    """First come, first served; decoding before prefill.

    Args:
        cache: the target's cache; its slots bound the number of running requests.
        max_rows: rows of one forward, at most.
        reserved: the number of rows for drafts that is reserved for a request, whichever others run; no prompt uses
            them. At most its even share, ``max_rows // cache.max_slots - 1``.
        drafted_first: a draft may begin with the first token of the answer: a prompt's last token is not fed, but is
            the root of that draft.
        prefixes: keeps the cache rows of finished requests; None: nothing is kept.
        enough: rows of prompts in a step beyond which no other prompt is begun; None: only ``max_rows`` bounds them.
    """

    def __init__(
        self,
        cache: KVCache,
        max_rows: int,
        reserved: Callable[[Request], int] = lambda request: 0,
        *,
        drafted_first: bool = False,
        prefixes: Prefixes | None = None,
        enough: int | None = None,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.reserved = reserved
        self.drafted_first = drafted_first
        self.prefixes = prefixes
        self.enough = max_rows if enough is None else enough
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.waiting)

    def next(self) -> Work:
        """Decide the next step. Requests that finished or were cancelled must have been removed."""
        places = self.cache if self.prefixes is None else self.prefixes
        while self.waiting and places.free_slots and len(self.running) < self.max_rows:
            request = self.waiting.popleft()
            if self.prefixes is None:
                request.slot = self.cache.acquire()
            else:
                request.slot = self.prefixes.acquire(request, self.running)
            request.admitted = perf_counter()
            self.running.append(request)
        decoding: list[Request] = []
        filling: list[Request] = []
        lengths = self.cache.lengths
        for request in self.running:
            # a prompt of which all but one token is cached, or was cut off, is read like any other: else the other
            # requests would decide whether its first token is drafted, and a seed would not give the same tokens
            cut = lengths[request.slot] or request.borders
            reads = bool(cut) and not request.num_output and not self.drafted_first
            last = lengths[request.slot] == len(request.tokens) - 1
            (decoding if last and not reads else filling).append(request)
        # a prompt of one token needs one row either way: it is a root
        kept = sum(map(self.reserved, decoding))
        spare = self.max_rows - len(decoding) - kept
        prefill: list[tuple[Request, int]] = []
        read = 0
        for request in filling:
            if spare <= 0 or read >= self.enough:
                break
            begin = lengths[request.slot]
            end = next((border for border in request.borders if border > begin), len(request.tokens))
            count = min(spare, end - begin, len(request.tokens) - self.drafted_first - begin)
            prefill.append((request, count))
            spare -= count
            read += count
        return Work(decoding, prefill, spare + kept, queued=bool(self.waiting))

    def remove(self, request: Request) -> None:
        """Take a finished request out and free its slot."""
        if request.slot >= 0:
            self.running.remove(request)
            if self.prefixes is None or not self.prefixes.keep(request):
                self.cache.release(request.slot)
            request.slot = -1
        elif request in self.waiting:
            self.waiting.remove(request)
