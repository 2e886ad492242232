"""Random delays at every hand-over between an engine and what works next to it: lanes, helpers' channels."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from foretoken.drafting.process import HelperProcess
from foretoken.engine.executors.worker_thread import WorkerThread

LONGEST = 0.004  # seconds


def at_every_hand_over(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[int]:
    """Orders are late, replies are late, a request to stop is seen late; the list counts them."""
    dice, lock, count = random.Random(seed), threading.Lock(), [0]

    def wait() -> None:
        with lock:
            seconds = dice.choice([0.0, dice.uniform(0.0, LONGEST)])
            count[0] += 1
        time.sleep(seconds)

    run, send, ask = WorkerThread._run, HelperProcess._send, HelperProcess.ask

    def late_run(self: WorkerThread, work: Callable[..., Any], stopped: Callable[[], bool]) -> Any:
        wait()
        try:
            return run(self, work, stopped)
        finally:
            wait()

    def late_send(self: HelperProcess, order: Any) -> None:
        wait()
        send(self, order)

    def late_ask(self: HelperProcess, order: Any, **options: Any) -> Any:
        found = ask(self, order, **options)
        wait()
        return found

    monkeypatch.setattr(WorkerThread, "_run", late_run)
    monkeypatch.setattr(HelperProcess, "_send", late_send)
    monkeypatch.setattr(HelperProcess, "ask", late_ask)
    return count
