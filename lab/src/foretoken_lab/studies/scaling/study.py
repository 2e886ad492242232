"""From raw points to distributions: which points a distribution is fitted to, and why one is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken_lab.studies.scaling.laws import BATCH, CAPACITY, DATA, LEAST_POINTS, Fit, Law, fit_log
from foretoken_lab.studies.scaling.points import Point
from foretoken_lab.studies.scaling.speed import Speed, model


@dataclass(frozen=True)
class Study:
    """What a sweep came to.

    Attributes:
        points: raw.
        fits: by the distribution's name.
        left_out: distributions that were not fitted, with the reason.
        speed: the model next to them.
    """

    points: tuple[Point, ...]
    fits: dict[str, Fit]
    left_out: dict[str, str]
    speed: Speed

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "points": [point.fields() for point in self.points],
            "fits": {name: fit.fields() for name, fit in self.fits.items()},
            "left_out": self.left_out,
            "speed": self.speed.fields(),
        }


def study(points: Sequence[Point], layers: int, tokens: int) -> Study:
    """Fit the three distributions, each with the others held fixed.

    Args:
        layers: D of the data distribution.
        tokens: T of the capacity distribution and of everything that was timed.
    """
    by_tokens = [(float(point.trained), point.accepted[point.most]) for point in points if point.layers == layers]
    by_layers = [(float(point.layers), point.accepted[point.most]) for point in points if point.tokens == tokens]
    fits: dict[str, Fit] = {}
    left_out: dict[str, str] = {}
    rates = best_rates([point for point in points if (point.layers, point.tokens) == (layers, tokens)])
    chosen: tuple[tuple[Law, list[tuple[float, float]]], ...] = (
        (DATA, by_tokens),
        (CAPACITY, by_layers),
        (BATCH, rates),
    )
    for law, pairs in chosen:
        different = len({x for x, _ in pairs})
        if different < max(LEAST_POINTS, len(pairs)):  # two heads that read as many tokens are one point
            left_out[law.name] = f"{different} different points of {len(pairs)}: {LEAST_POINTS} at least are needed"
        else:
            fits[law.name] = fit_log(law, [x for x, _ in pairs], [y for _, y in pairs])
    timed = [point for point in points if point.tokens == tokens]
    return Study(tuple(points), fits, left_out, model(timed))


def best_rates(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(b, tokens per second of the best k above 0) of one head."""
    found: dict[int, float] = {}
    for point in points:
        for each in point.timed:
            if each.nodes:
                found[each.batch] = max(found.get(each.batch, 0.0), each.tokens_per_second)
    return sorted((float(batch), rate) for batch, rate in found.items())
