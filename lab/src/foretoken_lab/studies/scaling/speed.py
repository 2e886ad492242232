"""A model of speed next to the distributions of acceptance: tokens per second = b A / (t_draft + t_verify).

    t_draft(b, k, D) = s + p D      least squares over D of the planner's draft costs, for each b and k
    t_verify(b, k)                  the rest of a step by its cost model: the median over D
    A(D, k)                         replayed along its record

Acceptance alone always favours more layers; this model says how many pay. Read it together with its comparison with the
measurements: it has two parameters for every b and k, and not many more points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from foretoken_lab.studies.scaling.points import Point


@dataclass(frozen=True)
class Modelled:
    """One setting.

    Attributes:
        predicted, measured: tokens per second, by the line through all D and with the network's own draft costs.
    """

    layers: int
    batch: int
    nodes: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Speed:
    """The model over all settings.

    Attributes:
        settings: each of them.
        error: median of |predicted / measured - 1|; None: there are none.
        best: for each b the setting of the highest predicted and of the highest measured rate, and plain decoding's.
    """

    settings: tuple[Modelled, ...]
    error: float | None
    best: tuple[dict[str, Any], ...]

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def model(points: Sequence[Point]) -> Speed:
    """The model of points that differ in their layers only."""
    settings: list[Modelled] = []
    timed = {(point.layers, each.batch, each.nodes): (point, each) for point in points for each in point.timed}
    for batch, nodes in sorted({(batch, nodes) for _, batch, nodes in timed if nodes}):
        seen = [pair for (_, b, k), pair in sorted(timed.items()) if (b, k) == (batch, nodes)]
        start, slope = _line([point.layers for point, _ in seen], [each.draft_seconds for _, each in seen])
        verify = median(each.step_seconds - each.draft_seconds for _, each in seen)
        for point, each in seen:
            seconds = max(start + slope * point.layers, 0.0) + verify
            tokens_per_second = batch * point.accepted[nodes] / seconds
            settings.append(Modelled(point.layers, batch, nodes, tokens_per_second, each.tokens_per_second))
    errors = [abs(each.predicted / each.measured - 1) for each in settings]
    best = []
    for batch in sorted({each.batch for each in settings}):
        here = [each for each in settings if each.batch == batch]
        plain = [each.tokens_per_second for (_, b, k), (_, each) in timed.items() if (b, k) == (batch, 0)]
        predicted, measured = max(here, key=lambda each: each.predicted), max(here, key=lambda each: each.measured)
        best.append(
            {
                "batch": batch,
                "plain": median(plain) if plain else None,
                "predicted": asdict(predicted),
                "measured": asdict(measured),
            }
        )
    return Speed(tuple(settings), median(errors) if errors else None, tuple(best))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Start and slope; of one x a constant."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x0) ** 2 for x in xs)
    slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    return y0 - slope * x0, slope
