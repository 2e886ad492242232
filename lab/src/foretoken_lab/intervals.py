"""Confidence intervals of a rate and of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretoken.certify.statistics import normal_quantile


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a rate; (0, 1) without trials.

    Raises:
        ValueError: more successes than trials, or a negative number.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    z = normal_quantile(0.5 + confidence / 2.0)
    rate = successes / trials
    scale = 1.0 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1.0 - rate) / trials + z * z / (4 * trials * trials)) / scale
    # at 0 and at all successes the ends are exact, and rounding must not push them out
    return (0.0 if successes == 0 else max(0.0, centre - half)), (1.0 if successes == trials else centre + half)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, tuple[float, float] | None]:
    """The mean of independent values and Student's interval; None for the interval of fewer than two values.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = _student_quantile(0.5 + confidence / 2.0, len(values) - 1) * math.sqrt(variance / len(values))
    return mean, (mean - half, mean + half)


def _student_quantile(p: float, df: int) -> float:
    """Quantile of Student's t for p >= 1/2: exact at 1 and 2 degrees, else within 0.2 % (Abramowitz, 26.7.5)."""
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2.0 * p - 1.0) * math.sqrt(2.0 / (4.0 * p * (1.0 - p)))
    z = normal_quantile(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / df**power for power, term in enumerate(terms))
