"""A drafter whose drafts ahead are written by a second process, and by this one where that process fails."""

from __future__ import annotations

import logging
import os
import socket
import statistics
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, cast
from weakref import finalize

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken.engine.executors.ahead import Ahead, AheadRule, Shadow
from foretoken.engine.executors.helper import LOADED, Order, Question, TargetFacts
from foretoken.models.language_model import LanguageModel

log = logging.getLogger(__name__)

_STARTING = 300.0  # seconds until a helper must have loaded its drafter
_LEAST, _MEDIANS = 1.0, 20.0  # seconds, and multiples of the usual answer, after which a helper counts as hung
_MESSAGE = 2  # whole seconds that a message may take on its way
_READING = 0.01  # seconds more for every token that it has not been told of before
_LOOK = 0.0005  # seconds between two looks whether the target is done
_RESTARTS = 1


class RemoteDrafter(Drafter):
    """Another drafter, asked ahead in a helper's process (helper.py); everything else is asked of it here.

    The helper is killed when it does not answer in time, and started once more; until the new one is ready, and for
    good after the second loss, drafts ahead are written in this process. The step in which it is lost has no guess.
    Every helper draws numbers of its own, and so does this process: after a loss the law stays, the text of a seed need
    not.

    Args:
        inner: of this process.
        config: it was made of; the helper's is made of it, too.
        target: what the helper's drafter has to know of it is sent along.
        threads: of the helper.
    Raises:
        ConfigError: the helper fails to start.
    """

    def __init__(self, inner: Drafter, config: Any, target: LanguageModel, threads: int) -> None:
        self.name, self.laws, self.branches = inner.name, inner.laws, inner.branches
        self.needs, self.offers, self.explanation = inner.needs, inner.offers, inner.explanation
        self._inner = inner
        facts = TargetFacts(
            target.name, target.vocab_size, target.dtype, target.device, target.trusted, target.tokenizer
        )
        self._made_of = (type(inner), config, facts, threads)
        self._epoch = self._number = 0
        self._known: dict[int, int] = {}  # request -> tokens of it that the helper was told of
        self._gone: list[int] = []
        self._answers: deque[float] = deque([0.0], maxlen=64)
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._since = False, 0.0
        self._restarts = 0  # who cannot start once is not started again
        self._begin()
        if not self.ready(_STARTING):
            self.close()
            raise ConfigError("lane='process': the helper did not start: see its messages above, or use lane='thread'")
        self._restarts = _RESTARTS

    @property
    def flops(self) -> float | None:
        return self._inner.flops

    def reading_flops(self, num_tokens: int) -> float:
        return self._inner.reading_flops(num_tokens)

    @property
    def pid(self) -> int | None:
        """Of the helper's process; None where there is none."""
        return None if self._process is None else self._process.pid

    def attach(self, cache: Any) -> None:
        self._inner.attach(cache)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Ahead by the helper, if it is there; else here."""
        if not all(isinstance(context, Shadow) for context in contexts):
            return self._inner.propose(contexts, budgets)
        if not self.ready():
            return self._inner.propose(contexts, budgets)
        found = self._ask(cast("Sequence[Shadow]", contexts), budgets)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [each for each in found if isinstance(each, Draft)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe(outcomes)

    def release(self, request_id: int) -> None:
        if self._known.pop(request_id, None) is not None:
            self._gone.append(request_id)
        self._inner.release(request_id)

    def close(self) -> None:
        """End the helper; nothing starts another one."""
        self._restarts = 0
        self._end()

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
            if not self._started and perf_counter() - self._since > _STARTING:
                self._lost(f"did not start within {_STARTING:.0f} s")
        except (EOFError, OSError):
            self._lost("ended while it started")
        return self._started

    # ------------------------------------------------------------------ the helper

    def _begin(self) -> None:
        ours, theirs = Pipe()
        _bound(ours)
        started = f"from foretoken.engine.executors.helper import main; main({theirs.fileno()})"
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

    def _ask(self, shadows: Sequence[Shadow], budgets: Sequence[Budget]) -> list[Ahead]:
        pipe = self._pipe
        assert pipe is not None
        unread = sum(len(each.tokens) - self._known.get(each.request_id, 0) for each in shadows)
        deadline = max(_LEAST, _MEDIANS * statistics.median(self._answers)) + _READING * unread
        questions = tuple(map(_question, shadows, budgets))
        self._number += 1
        order = Order(self._number, self._epoch, questions, tuple(self._gone))
        stopped = next((b.stop_rule.stopped for b in budgets if isinstance(b.stop_rule, AheadRule)), None)
        began = perf_counter()
        try:
            pipe.send(order)
            self._gone.clear()
            self._known.update({each.request_id: len(each.tokens) for each in shadows})
            while not pipe.poll(deadline if stopped is None else _LOOK):
                if perf_counter() - began > deadline:
                    self._lost(f"did not answer within {deadline:.1f} s")
                    return [NO_DRAFT] * len(shadows)
                if stopped is not None and stopped():
                    pipe.send(None)  # STOP
                    stopped = None
            number, found = pipe.recv()
        except (EOFError, OSError):
            self._lost("has ended")
            return [NO_DRAFT] * len(shadows)
        assert number == self._number, "an answer to another order"
        self._answers.append(perf_counter() - began)
        answers: list[Ahead] = found
        return answers

    def _lost(self, why: str) -> None:
        """End what is left of the helper, say so, and start another one if that has not been tried."""
        log.warning(
            "the helper process %s, which drafts for method '%s', %s: %s",
            self.pid,
            self.name,
            why,
            "another one is started" if self._restarts else "drafts are written in this process from now on",
        )
        self._end()
        if self._restarts:
            self._restarts -= 1
            self._begin()

    def _end(self) -> None:
        self._pipe = self._process = None
        self._epoch += 1
        self._known.clear()
        self._gone.clear()
        self._finalizer()


def _question(shadow: Shadow, budget: Budget) -> Question:
    rule = budget.stop_rule
    return Question(
        shadow.request_id,
        shadow.tokens,
        shadow.num_prompt,
        shadow.params,
        shadow.streams.seed,
        shadow.stop_ids,
        shadow.own_past,
        replace(budget, stop_rule=None),
        rule.past if isinstance(rule, AheadRule) else None,
        not shadow.own_past,
    )


def _bound(pipe: Connection) -> None:
    """Let no read or write of it wait for a helper that has stopped in the middle of a message."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _MESSAGE, 0))


def _kill(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()  # it holds nothing that could be lost
    process.wait()
