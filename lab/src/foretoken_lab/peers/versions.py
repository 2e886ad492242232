"""What a result must say next to the package's own provenance: peers' versions, the command, and how quiet it was."""

from __future__ import annotations

import os
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PEERS = ("llama-cpp-python", "gguf", "openvino", "openvino-genai", "numpy", "scikit-learn")


def versions() -> dict[str, Any]:
    """Versions of the peers, and the processor that llama.cpp was built for; None for an absent peer."""
    found: dict[str, Any] = {}
    for name in _PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    try:
        import llama_cpp
    except ImportError:
        return found
    found["llama.cpp build"] = llama_cpp.llama_print_system_info().decode().strip()
    return found


def command(script: str) -> str:
    """The command line, with absolute paths cut to their last part: the rest is of no use on another machine.

    Args:
        script: a file of ``lab/benchmarks``, or ``-m`` and a module.
    """
    called = script.split() if script.startswith("-m ") else [f"lab/benchmarks/{script}"]
    arguments = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return shlex.join(["python", *called, *arguments])


class Quiet:
    """How much processor time others took while we measured.

    It matters more than it seems: threads of an OpenMP team wait for each other, so one busy neighbour can slow
    transformers and llama.cpp tenfold, and a comparison made then is worth nothing.
    """

    LIMIT = 0.03

    def __init__(self) -> None:
        self.began, self.busy, self.own = time.time(), _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """Share of all processors' time that other processes used since the start; None where it cannot be known."""
        busy = _busy_seconds()
        if busy is None or self.busy is None:
            return None
        others = (busy - self.busy) - (_own_seconds() - self.own)
        return max(others, 0.0) / ((time.time() - self.began) * (os.cpu_count() or 1))

    def report(self) -> float | None:
        """The share, after a warning if it is too much for figures to be used."""
        share = self.share()
        if share is not None and share > self.LIMIT:
            print(
                f"WARNING: other processes used {share:.0%} of the processors during this run; "
                "it shows that the scripts work, and no more. Measure again on a quiet machine.",
                file=sys.stderr,
            )
        return share


def _busy_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft, stolen = (int(each) for each in fields[:8])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of this process and of those that it started, llama.cpp's servers among them."""
    times = os.times()
    running = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    ended = times.children_user + times.children_system
    return times.user + times.system + ended + sum(each.user + each.system for each in running)
