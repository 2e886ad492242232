"""Which of several points no other beats in both of two figures."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other equals or exceeds in both figures and exceeds in one; higher is better.

    Points that are equal are on the front together. The front is one of estimates: it knows nothing of intervals.
    """
    return [
        index
        for index, (x, y) in enumerate(points)
        if not any(a >= x and b >= y and (a > x or b > y) for a, b in points)
    ]
