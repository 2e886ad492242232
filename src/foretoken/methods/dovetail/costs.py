"""The time of a verification of n rows on this machine, and the draft nodes that are worth verifying.

    T(n)        seconds of a forward of n rows, measured when the target is loaded; a lower convex hull in between
    selected    the best nodes by reach, while   P(node is accepted) > r (T(n + 1) - T(n))      r: tokens per second

On a CPU T is flat while weights are loaded from memory, and then rises; a straight line would make the first rows
too expensive and the later ones too cheap. For a ratio of expectations the rule is optimal at the best rate r
(engine/draft_length/controller.py). T is convex, so the first node that does not pay ends the draft.

Paper: arXiv:2412.18934 lowers EAGLE-2's 60 candidates to 16, or 7, by hand. Ours: the rule.
"""

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.stop_rule import StopRule
from foretoken.drafting.exit_costs import on_line
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel

ROWS = (1, 2, 4, 8, 16, 32)  # numbers of rows to time
_PREFIX = 64  # rows before the timed rows
_REPEATS = 12  # on a busy machine most forwards are interrupted
_SECONDS = 3.0  # approximate limit of the measurement: a slow target is timed once per number of rows
_KEEPS = 0.95  # weight of the old rate in the moving average, per step


@dataclass(frozen=True)
class CostTable:
    """The verification time T(n).

    Attributes:
        points: (rows, seconds), rows increasing from 1.
    Raises:
        ValueError: the points are no such table.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rows = [each for each, _ in self.points]
        if len(rows) < 2 or rows[0] != 1 or sorted(set(rows)) != rows or any(t <= 0 for _, t in self.points):
            raise ValueError(f"points={self.points!r}: increasing rows from 1, two at least, and seconds above 0")

    @functools.cached_property
    def hull(self) -> list[tuple[int, float]]:
        """Return the points on the lower convex hull; times never decrease."""
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
        """Return the seconds of a forward of this many rows."""
        points, seconds = zip(*self.hull, strict=True)
        return on_line(points, seconds, rows)

    @functools.lru_cache(maxsize=256)  # noqa: B019  (one table for each engine)
    def prices(self, requests: int, nodes: int) -> tuple[float, ...]:
        """Return the seconds of each request's next node, for each number of nodes, if all requests draft alike."""
        at = [self.at(requests * (1 + node)) for node in range(nodes + 1)]
        return tuple((more - less) / requests for less, more in itertools.pairwise(at))


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def measure(target: LanguageModel, rows: Sequence[int] = ROWS) -> CostTable:
    """Time forwards of a target after a short prefix: the best of several each, in turns."""
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
    """Selects the nodes of one draft (:class:`foretoken.core.stop_rule.StopRule`).

    Attributes:
        stands: acceptance rate of nodes, for each tenth of confidence.
        least: minimum acceptance probability of each node, in the order of selection.
    """

    stands: tuple[float, ...]
    least: tuple[float, ...]

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        tenth = min(len(self.stands) - 1, int(confidence * len(self.stands)))
        return num_nodes < len(self.least) and reach * self.stands[tenth] > self.least[num_nodes]


class Rate:
    """Tokens per second of the steps with drafts, by the number of drafting requests."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Update the rate with one step."""
        before = self._sums.get(requests, (0.0, 0.0))
        self._sums[requests] = before[0] * _KEEPS + tokens, before[1] * _KEEPS + seconds

    def of(self, requests: int) -> float:
        """Return the rate; 0 before the first step with this number of requests."""
        tokens, seconds = self._sums.get(requests, (0.0, 0.0))
        return tokens / seconds if seconds else 0.0
