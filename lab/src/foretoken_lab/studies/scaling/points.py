"""The raw points of a sweep: one head each, its measurements, and the folder in which they survive a kill.

    OUT/sweep.json             what the sweep is; another one in the same folder is refused
    OUT/heads/D2-T16384/       a head, with its training's own checkpoints
    OUT/points/D2-T16384.json  its measurements, written when all of them are known

Letters: D decoder layers, T training tokens, b requests, k nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write_whole

SWEEP = "sweep.json"


@dataclass(frozen=True)
class Timed:
    """A step of b requests with k nodes; k = 0 is plain decoding.

    Attributes:
        step_seconds, draft_seconds: by the planner's cost model.
        tokens_per_second: of all requests.
    """

    batch: int
    nodes: int
    step_seconds: float
    draft_seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Point:
    """One head.

    Attributes:
        layers, tokens: D, and the requested T.
        trained: tokens that it really read, whole steps of both stages.
        parameters: of the head.
        accepted: k -> tokens per step, replayed along the target's recorded answers.
        recorded: tokens of these answers.
        timed: steps that were timed.
    """

    layers: int
    tokens: int
    trained: int
    parameters: int
    accepted: Mapping[int, float]
    recorded: int
    timed: tuple[Timed, ...]

    @property
    def name(self) -> str:
        """Of its folder and file."""
        return name_of(self.layers, self.tokens)

    @property
    def most(self) -> int:
        """The largest k, by which heads are compared."""
        return max(self.accepted)

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def name_of(layers: int, tokens: int) -> str:
    """Of a head's folder and of its point's file."""
    return f"D{layers}-T{tokens}"


def point_of(stored: Mapping[str, Any]) -> Point:
    """The point that :meth:`Point.fields` wrote."""
    return Point(
        layers=stored["layers"],
        tokens=stored["tokens"],
        trained=stored["trained"],
        parameters=stored["parameters"],
        accepted={int(nodes): float(gain) for nodes, gain in stored["accepted"].items()},
        recorded=stored["recorded"],
        timed=tuple(Timed(**each) for each in stored["timed"]),
    )


def claim(out: Path, sweep: Mapping[str, Any]) -> None:
    """Take a folder for a sweep, or find that it is this sweep's already.

    Raises:
        ForetokenError: another sweep's points lie in it, or something else.
    """
    path = out / SWEEP
    if path.exists():
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")).items())
        except (OSError, ValueError, AttributeError) as error:
            raise ForetokenError(f"{path}: cannot be read ({error}); name another --out") from None
        changed = sorted(key for key in {*found, *sweep} if found.get(key) != sweep.get(key))
        if changed:
            raise ForetokenError(f"{out}: holds a sweep with another {', '.join(changed)}; name another --out")
    elif out.is_dir() and any(out.iterdir()):
        raise ForetokenError(f"{out}: holds something else than a sweep; name another --out")
    else:  # what makes the folder ours comes first
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dict(sweep), indent=1) + "\n")
    for name in ("points", "heads"):
        (out / name).mkdir(exist_ok=True)


def read(out: Path, name: str) -> Point | None:
    """A point that was measured already; None: it was not.

    Raises:
        ForetokenError: its file is damaged.
    """
    path = out / "points" / f"{name}.json"
    if not path.is_file():
        return None
    try:
        point = point_of(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number))
        if point.name != name:
            raise ValueError(f"it is of {point.name}")
        return point
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForetokenError(f"{path}: cannot be read ({error!r}); remove it, it is measured again then") from None


def write(out: Path, point: Point) -> None:
    """Keep a point."""
    write_whole(out / "points" / f"{point.name}.json", json.dumps(point.fields(), indent=1) + "\n")


def _no_number(name: str) -> float:
    raise ValueError(f"it holds {name}")
