"""A process that calls one function and writes the outcomes: run as a file, with Python's own library only.

stdin: ``source``, ``name`` and ``calls`` (JSON of keyword arguments, one object a call); stdout: one outcome a call,
its type and value as text, None where it raised. behaviour.py has looked the source through before.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SECONDS = 1  # of processor time
MEMORY = 256 << 20  # bytes of address space
LONGEST = 10_000  # characters of an outcome
BUILTINS = (
    *(abs, all, any, bool, dict, divmod, enumerate, filter, float, int, isinstance, len, list, map, max, min, pow),
    *(range, reversed, round, set, sorted, str, sum, tuple, zip),
)


def limit() -> None:
    """Little memory, a second of processor time, and nothing written to files, where the system has such limits."""
    try:
        import resource
    except ImportError:  # Windows: the clock of behaviour.py is left
        return
    for which, most in (("RLIMIT_CPU", SECONDS), ("RLIMIT_AS", MEMORY), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, which), (most, most))
        except (ValueError, OSError):  # macOS bounds no address space
            continue


def outcomes(source: str, name: str, calls: str) -> list[list[str] | None]:
    """Call a function.

    Args:
        calls: JSON; read anew for each call, so that what a call does to its arguments stays with it.
    """
    allowed: dict[str, Any] = {"__builtins__": {each.__name__: each for each in BUILTINS}}
    exec(source, allowed)  # noqa: S102 - what this process is for
    found: list[list[str] | None] = []
    for place in range(len(json.loads(calls))):
        try:
            found.append(told(allowed[name](**json.loads(calls)[place])))
        except Exception:  # of any kind: a model wrote this code
            found.append(None)
    return found


def told(value: Any) -> list[str]:
    """Type and value of an outcome as text, the same for equal ones; a set is in order."""
    if isinstance(value, (list, tuple, dict, set)) and len(value) > LONGEST:
        raise ValueError("long")
    if isinstance(value, set):
        return ["set", json.dumps(sorted(told(each) for each in value))]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, json.dumps([told(each) for each in value])]
    if isinstance(value, dict):
        return ["dict", json.dumps(sorted([told(key), told(each)] for key, each in value.items()))]
    return [type(value).__name__, repr(value)[:LONGEST]]


if __name__ == "__main__":
    order = json.load(sys.stdin)
    limit()
    sys.stdout.write(json.dumps(outcomes(order["source"], order["name"], order["calls"])))
