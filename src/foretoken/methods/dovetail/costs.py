"""What a verification of n rows takes on this machine, and which nodes of a draft are worth theirs.

    T(n)        seconds of a forward of n rows, measured when the target is loaded; a lower convex hull in between
    taken       the best nodes by reach, while   P(node stands) > r (T(n + 1) - T(n))      r: tokens per second

On a CPU T is flat while the target waits for its weights, and then has an elbow: a straight line through it would price
the first rows too high and the later ones too low. For a ratio of expectations the rule is optimal at the best rate r
(engine/draft_length/controller.py), and since T is convex the first node that does not pay ends the draft.

Paper: arXiv:2412.18934 lowers EAGLE-2's 60 candidates to 16, or 7, by hand. Ours: the rule.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.stop_rule import StopRule
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel

ROWS = (1, 2, 4, 8, 16, 32)  # that are timed
_PREFIX = 64  # rows before them
_REPEATS = 12  # on a busy machine most forwards are interrupted
_SECONDS = 3.0  # for all of it, about: a slow target is timed once per number
_KEEPS = 0.95  # of the rate, per step


@dataclass(frozen=True)
class CostTable:
    """T(n).

    Attributes:
        points: (rows, seconds), rows increasing from 1.
    Raises:
        ValueError: it is no such table.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rows = [each for each, _ in self.points]
        if len(rows) < 2 or rows[0] != 1 or sorted(set(rows)) != rows or any(t <= 0 for _, t in self.points):
            raise ValueError(f"points={self.points!r}: increasing rows from 1, two at least, and seconds above 0")

    @functools.cached_property
    def hull(self) -> list[tuple[int, float]]:
        """The points that lie on the lower convex hull, with times that do not fall."""
        kept: list[tuple[int, float]] = []
        least = self.points[-1][1]
        rising = []
        for rows, seconds in reversed(self.points):
            least = min(least, seconds)
            rising.append((rows, least))
        for rows, seconds in reversed(rising):
            while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-1], (rows, seconds)):
                kept.pop()
            kept.append((rows, seconds))
        return kept

    def at(self, rows: int) -> float:
        """Seconds of so many rows."""
        hull = self.hull
        for left, right in itertools.pairwise(hull):
            if rows <= right[0]:
                return left[1] + (rows - left[0]) * _slope(left, right)
        return hull[-1][1] + (rows - hull[-1][0]) * _slope(*hull[-2:])

    @functools.lru_cache(maxsize=256)  # noqa: B019  (one table for each engine)
    def prices(self, requests: int, nodes: int) -> tuple[float, ...]:
        """Seconds of each request's next node, for so many nodes, while the others draft alike."""
        at = [self.at(requests * (1 + node)) for node in range(nodes + 1)]
        return tuple((more - less) / requests for less, more in itertools.pairwise(at))


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def measure(target: LanguageModel, rows: Sequence[int] = ROWS) -> CostTable:
    """Time forwards of a target after a short prefix: the best of a few each, in turns."""
    count = max(2, min(max(rows), target.max_length // 2))
    prefix = min(_PREFIX, target.max_length - count)
    rows = [each for each in rows if each <= count]
    cache = target.new_cache(1)
    slot = cache.acquire()

    def forward(begin: int, number: int, wanted: int) -> float:
        batch = PackedBatch()
        batch.add_chunk(slot, begin, [0] * number, wanted=wanted, verification=True)
        cache.reserve(slot, number)
        began = time.perf_counter()
        target.forward(batch, DensePlan(cache, batch), top=1)
        return time.perf_counter() - began

    forward(0, prefix, 1)
    cache.commit(slot, range(prefix))
    best = [forward(prefix, each, each) for each in rows]
    began = time.perf_counter()
    for _ in range(_REPEATS):
        if time.perf_counter() - began > _SECONDS:
            break
        best = [min(known, forward(prefix, each, each)) for known, each in zip(best, rows, strict=True)]
    return CostTable(tuple(zip(rows, best, strict=True)))


@dataclass(frozen=True, slots=True)
class Affordable(StopRule):
    """Which nodes of one draft are taken (:class:`foretoken.core.stop_rule.StopRule`).

    Attributes:
        stands: of each tenth of confidence, how often such a node stood.
        least: what each node must promise, in the order in which they are taken.
    """

    stands: tuple[float, ...]
    least: tuple[float, ...]

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        tenth = min(len(self.stands) - 1, int(confidence * len(self.stands)))
        return num_nodes < len(self.least) and reach * self.stands[tenth] > self.least[num_nodes]


class Rate:
    """Tokens per second of the steps that drafted, by how many requests did."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Take in one step."""
        before = self._sums.get(requests, (0.0, 0.0))
        self._sums[requests] = before[0] * _KEEPS + tokens, before[1] * _KEEPS + seconds

    def of(self, requests: int) -> float:
        """0 before the first step of so many."""
        tokens, seconds = self._sums.get(requests, (0.0, 0.0))
        return tokens / seconds if seconds else 0.0
