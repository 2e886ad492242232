"""Two runs over the same examples: how much accuracy was lost, and how sure that is.

The answers are paired, so that hard and easy examples cancel: far fewer are needed than for two separate samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken_lab.intervals import wilson_interval


@dataclass(frozen=True, slots=True)
class Difference:
    """The accuracy of the first run minus that of the second, with a 95 % interval.

    Attributes:
        mean, low, high: in shares, from -1 to 1.
        num_pairs: examples that both answered.
        first_only, second_only: examples that one of them got right and the other did not.
    """

    mean: float
    low: float
    high: float
    num_pairs: int
    first_only: int
    second_only: int


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Difference:
    """The difference of two paired shares.

    Paper:   Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on
             paired data", Statistics in Medicine 17, method 10 (Wilson limits of both shares, and their correlation).
    Differs: nothing.

    Args:
        first, second: whether each example was answered correctly, in the same order.
    Raises:
        ValueError: lengths differ, or there are no pairs.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} answers: pairs are needed")
    n = len(first)
    both = sum(one and other for one, other in zip(first, second, strict=True))
    first_only, second_only = sum(first) - both, sum(second) - both
    neither = n - both - first_only - second_only
    p1, p2 = (both + first_only) / n, (both + second_only) / n
    low1, high1 = wilson_interval(both + first_only, n)
    low2, high2 = wilson_interval(both + second_only, n)
    phi = _correlation(both, first_only, second_only, neither)
    mean = p1 - p2
    return Difference(
        mean,
        mean - _joined(p1 - low1, high2 - p2, phi),
        mean + _joined(high1 - p1, p2 - low2, phi),
        n,
        first_only,
        second_only,
    )


def _joined(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2.0 * phi * one * other + other * other))


def _correlation(both: int, first_only: int, second_only: int, neither: int) -> float:
    """The correlation of two yes-no answers, with the paper's continuity correction where it is positive."""
    n = both + first_only + second_only + neither
    spread = (both + first_only) * (second_only + neither) * (both + second_only) * (first_only + neither)
    if spread == 0:
        return 0.0
    product = both * neither - first_only * second_only
    corrected = float(product) if product < 0 else max(0.0, product - n / 2)
    return corrected / math.sqrt(spread)
