"""Where and when drafter and target run; the executors by the names that users type.

PEARL in five files: overlapped.py (pre- and post-verify), overlap.py (what the drafter sees meanwhile),
worker_thread.py (its thread), executor.py (the verbs of a step), and verifiers/guessed.py (the test of the block's
first token). serial.py is the order that it must equal, auto.py chooses the faster of both.
"""

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
