"""Who runs when and where; the executors by the names that users type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from foretoken.engine.executors.auto import AutoExecutor
from foretoken.engine.executors.executor import Executor
from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.serial import SerialExecutor

NAMED: Mapping[str, Callable[[], Executor]] = {
    "serial": SerialExecutor,
    "pearl": OverlappedExecutor,
    "auto": AutoExecutor,
}
