"""A helper process: started, given orders, timed, and replaced once when it is lost.

    engine          ◄──── helper            HERE: it reads now; the engine sends its work
                    ◄────                   LOADED
              ORDER ────►                   anything with a number
              STOP  ────►                   return the partial result
                    ◄──── REPLY             with the order's number; some orders have none

One pipe, one order with a reply at a time. The helper ends when the pipe does, so that no engine leaves one after. An
interrupt from the keyboard does not reach it: it has a session of its own, and the engine handles the interrupt.
"""

import logging
import os
import pickle
import socket
import statistics
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Protocol
from weakref import finalize

import torch

log = logging.getLogger(__name__)

HERE, LOADED = "here", "loaded"
STARTING = 300.0  # seconds until a helper must have loaded
_LEAST, _MEDIANS = 1.0, 20.0  # seconds, and multiples of the usual answer, after which a helper counts as hung
_MESSAGE = 2  # whole seconds that a message may take on its way
_LOOK = 0.0005  # seconds between two polls whether the engine wants the partial result
_RESTARTS = 1


class Numbered(Protocol):
    """An order."""

    @property
    def number(self) -> int: ...


class Answers(Protocol):
    """The object in the helper process that answers orders."""

    def answer(self, order: Any) -> Any:
        """The reply; None: there is none."""
        ...


class HelperProcess:
    """One helper at a time.

    Args:
        make: a function that can be pickled, called in the helper as ``make(*arguments, stopped=...)``.
        purpose: its description in messages, as in "which drafts for method 'x'".
        without: the consequence in messages when no helper is left.
        forget: called when a helper is lost: a new one knows nothing.
        threads: of the helper.

    Attributes:
        epoch: helpers that were lost or ended so far.
        bytes_sent, bytes_received: payload of all orders and replies.
    """

    def __init__(
        self,
        make: Callable[..., Answers],
        arguments: tuple[Any, ...],
        *,
        purpose: str,
        without: str,
        forget: Callable[[], None],
        threads: int,
    ) -> None:
        self._made_of = (make, arguments, threads)
        self._purpose, self._without, self._forget = purpose, without, forget
        self.epoch = self._number = 0
        self.bytes_sent = self.bytes_received = 0
        self._answers: deque[float] = deque([0.0], maxlen=64)
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._since = False, 0.0
        self._restarts = 0  # a helper that failed to start is not started again
        self._begin()

    def started(self, seconds: float) -> bool:
        """Wait for the first one; from then on a lost one is replaced."""
        if self.ready(seconds):
            self._restarts = _RESTARTS
        return self._started

    @property
    def pid(self) -> int | None:
        """Of the helper; None where there is none."""
        return None if self._process is None else self._process.pid

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether the helper is there; waits so long for one that is starting."""
        if self._pipe is None or self._started:
            return self._pipe is not None
        until = perf_counter() + seconds
        try:
            while not self._started and self._pipe.poll(max(0.0, until - perf_counter())):
                self._started = self._pipe.recv() == LOADED
                if not self._started:  # it is here, and reads
                    self._pipe.send(self._made_of)
            if not self._started and perf_counter() - self._since > STARTING:
                self._lost(f"did not start within {STARTING:.0f} s")
        except (EOFError, OSError):
            self._lost("ended while it started")
        return self._started

    def next_number(self) -> int:
        """Of the next order."""
        self._number += 1
        return self._number

    def tell(self, order: Numbered) -> bool:
        """Give an order that has no reply; False: the helper was lost."""
        try:
            self._send(order)
        except (EOFError, OSError):
            self._lost("has ended")
            return False
        return True

    def ask(self, order: Numbered, *, more_seconds: float = 0.0, stopped: Callable[[], bool] | None = None) -> Any:
        """The reply to an order; None: the helper was lost.

        Args:
            more_seconds: allowed in addition to the usual time.
            stopped: whether the engine wants the partial result.
        """
        pipe = self._pipe
        assert pipe is not None
        deadline = max(_LEAST, _MEDIANS * statistics.median(self._answers)) + more_seconds
        began = perf_counter()
        try:
            self._send(order)
            while True:
                while not pipe.poll(deadline if stopped is None else _LOOK):
                    if perf_counter() - began > deadline:
                        self._lost(f"did not answer within {deadline:.1f} s")
                        return None
                    if stopped is not None and stopped():
                        self._send(None)  # STOP
                        stopped = None
                payload = pipe.recv_bytes()
                number, found = pickle.loads(payload)  # noqa: S301  (our own helper wrote it)
                if number == order.number:  # else to an order that was interrupted
                    break
        except (EOFError, OSError):
            self._lost("has ended")
            return None
        self.bytes_received += len(payload)
        self._answers.append(perf_counter() - began)
        return found

    def close(self) -> None:
        """End the helper; nothing starts another one."""
        self._restarts = 0
        self._end()

    # ------------------------------------------------------------------ the process

    def _begin(self) -> None:
        ours, theirs = Pipe()
        _bound(ours)
        started = f"from foretoken.drafting.process import main; main({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", started],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        theirs.close()
        self._pipe, self._process = ours, process
        self._started, self._since = False, perf_counter()
        self._finalizer = finalize(self, _kill, process, ours)

    def _send(self, order: Numbered | None) -> None:
        payload = pickle.dumps(order, protocol=pickle.HIGHEST_PROTOCOL)
        assert self._pipe is not None
        self._pipe.send_bytes(payload)
        self.bytes_sent += len(payload)

    def _lost(self, why: str) -> None:
        """End the rest of the helper, log a warning, and start another one if that has not been tried."""
        log.warning(
            "the helper process %s, %s, %s: %s",
            self.pid,
            self._purpose,
            why,
            "another one is started" if self._restarts else self._without,
        )
        self._end()
        if self._restarts:
            self._restarts -= 1
            self._begin()

    def _end(self) -> None:
        self._pipe = self._process = None
        self.epoch += 1
        self._forget()
        self._finalizer()


def main(descriptor: int) -> None:
    """Run the helper's process, until the pipe with this file descriptor ends."""
    pipe = Connection(descriptor)
    try:
        pipe.send(HERE)
        make, arguments, threads = pipe.recv()
        torch.set_num_threads(threads)
        answers: Answers = make(*arguments, stopped=pipe.poll)
        pipe.send(LOADED)
        while True:
            order = pickle.loads(pipe.recv_bytes())  # noqa: S301  (our own engine wrote it)
            reply = None if order is None else answers.answer(order)  # None: a STOP that came too late
            if reply is not None:
                pipe.send_bytes(pickle.dumps((order.number, reply), protocol=pickle.HIGHEST_PROTOCOL))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the engine is gone, or wants no more; there is nothing to put away


def _bound(pipe: Connection) -> None:
    """Let no read or write of it wait for a helper that has stopped in the middle of a message."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _MESSAGE, 0))


def _kill(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()  # it holds nothing that could be lost
    process.wait()
