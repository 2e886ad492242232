"""Serial or overlapped, whichever is faster: measured in turns, by the number of running requests."""

from dataclasses import dataclass, field
from time import perf_counter

from foretoken.engine.executors.executor import Executor, Verbs
from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.serial import SerialExecutor
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work

_SETTLING = 8  # first steps of a turn, not counted: caches, threads and draft length settle
_TRIAL = 32  # counted steps of a turn
_FIRST_REST, _LAST_REST = 1024, 16384  # steps until the slower one is tried again; twice as many whenever it loses
_GAIN = 1.02  # smallest gain of the overlapped order; less is within the noise of such turns


@dataclass(slots=True)
class _Turns:
    """The current turn and the results of earlier ones, for a similar number of requests.

    Attributes:
        rates: tokens per second of each order's last trial.
        ahead: whether this turn is the overlapped order's.
        left: steps of this turn.
        counted: whether the turn is a trial.
    """

    rates: dict[bool, float] = field(default_factory=dict)
    ahead: bool = False
    left: int = _SETTLING + _TRIAL
    counted: bool = True
    rest: int = _FIRST_REST
    tokens: int = 0
    seconds: float = 0.0

    @property
    def faster(self) -> bool:
        """Whether the overlapped order was the faster one."""
        return self.rates.get(True, 0.0) > _GAIN * self.rates.get(False, 0.0)

    def measure(self, tokens: int, seconds: float) -> None:
        """Add a step of the current turn, and choose the next one when it ends."""
        self.left -= 1
        if self.counted and self.left < _TRIAL:
            self.tokens += tokens
            self.seconds += seconds
        if self.left > 0:
            return
        if not self.counted:  # the slower one is tried again
            self.ahead, self.left, self.counted = not self.ahead, _SETTLING + _TRIAL, True
        else:
            before = self.faster
            self.rates[self.ahead] = self.tokens / self.seconds if self.seconds else 0.0
            if len(self.rates) == 1:
                self.ahead, self.left = True, _SETTLING + _TRIAL
            else:
                self.rest = min(2 * self.rest, _LAST_REST) if self.faster == before else _FIRST_REST
                self.ahead, self.left, self.counted = self.faster, self.rest, False
        self.tokens, self.seconds = 0, 0.0


class AutoExecutor(Executor):
    """Tries both orders, keeps the faster one, and tries the other one again from time to time.

    The serial order in turn omits drafts where plain decoding is faster (engine/draft_length/controller.py). If the
    text of a seeded request depends on its drafts, it must not depend on measured times: its steps are serial.
    """

    name = "auto"

    def __init__(self) -> None:
        self.serial = SerialExecutor()
        self.overlapped = OverlappedExecutor()
        self._turns: dict[int, _Turns] = {}  # by the magnitude of the number of requests

    @property
    def explanation(self) -> str:
        """Results of the trials until now, for the user; "" before the first has ended."""
        found = [
            f"{'1 request' if size == 1 else f'{1 << (size - 1)} requests or more'}: "
            f"serial {turns.rates[False]:.0f}, pearl {turns.rates[True]:.0f} tokens/s"
            for size, turns in sorted(self._turns.items())
            if len(turns.rates) == 2
        ]
        return "; ".join(found)

    def run(self, engine: Verbs, work: Work, began: float) -> Round:
        if not work.decoding or any(request.history_only for request in work.decoding):
            return self.serial.run(engine, work, began)
        turns = self._turns.setdefault(len(work.decoding).bit_length(), _Turns())
        executor = self.overlapped if turns.ahead else self.serial
        current = executor.run(engine, work, began)
        if not work.prefill:  # the time of prompts is not that of decoding
            turns.measure(current.num_tokens, perf_counter() - began)
        return current

    def close(self) -> None:
        self.overlapped.close()
