"""Goodness of fit and homogeneity of two samples, with torch only, so that `certify` does not need scipy."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MIN_EXPECTED = 5.0  # the usual minimum of a cell's expected count for the normal approximation


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The result of a chi-square test; ``p_value`` is 1 if pooling reduced it to a single cell (nothing to test)."""

    statistic: float
    df: int
    p_value: float


def normal_quantile(p: float) -> float:
    """The standard normal value that a share p of draws stays below."""
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))


def chi_square_tail(statistic: float, df: int) -> float:
    """P(X >= statistic) for X chi-square with ``df`` degrees of freedom; 1 if df is 0."""
    if df <= 0 or statistic <= 0.0:
        return 1.0
    if math.isinf(statistic):
        return 0.0
    half = torch.tensor([df / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(counts: Sequence[float], probabilities: Sequence[float]) -> ChiSquare:
    """Run Pearson's test of observed counts against a known distribution.

    Cells expected fewer than five times are pooled, the rarest first; cells of probability 0 are not
    pooled: one observation there refutes the distribution (statistic inf, p-value 0).

    Args:
        counts: observations per cell.
        probabilities: the distribution, same length, sum 1 (within 1e-6).
    Raises:
        ValueError: lengths differ or the distribution does not sum to 1.
    """
    if len(counts) != len(probabilities):
        raise ValueError(f"{len(counts)} counts but {len(probabilities)} probabilities")
    if abs(math.fsum(probabilities) - 1.0) > 1e-6:
        raise ValueError(f"the distribution sums to {math.fsum(probabilities):g}, not to 1")
    total = math.fsum(counts)
    if any(count > 0 and p <= 0.0 for count, p in zip(counts, probabilities, strict=True)):
        return ChiSquare(math.inf, len(counts) - 1, 0.0)
    cells = _pool([(total * p, (count,)) for count, p in zip(counts, probabilities, strict=True) if p > 0.0])
    statistic = math.fsum((count - expected) ** 2 / expected for expected, (count,) in cells)
    return ChiSquare(statistic, len(cells) - 1, chi_square_tail(statistic, len(cells) - 1))


def homogeneity(first: Iterable[Hashable], second: Iterable[Hashable]) -> ChiSquare:
    """Test whether two samples have the same distribution: Pearson's test on the two-row table of their values.

    Values are pooled, the rarest first, until each row expects each of them five times.

    Args:
        first: observations, any hashable values.
        second: observations of the other sample; sizes may differ.
    """
    rows = (Counter(first), Counter(second))
    sizes = tuple(sum(row.values()) for row in rows)
    if not all(sizes):
        raise ValueError("both samples need observations")
    total = sum(sizes)
    shares = tuple(size / total for size in sizes)
    # order equal counts independently of hashing, so that the result is the same in every process
    values = sorted(rows[0] | rows[1], key=repr)
    table = [(min(shares) * (rows[0][v] + rows[1][v]), (rows[0][v], rows[1][v])) for v in values]
    statistic = 0.0
    cells = _pool(table)
    for _, observed in cells:
        both = sum(observed)
        statistic += sum(
            (seen - share * both) ** 2 / (share * both) for seen, share in zip(observed, shares, strict=True)
        )
    return ChiSquare(statistic, len(cells) - 1, chi_square_tail(statistic, len(cells) - 1))


def _pool(cells: list[tuple[float, tuple[Any, ...]]]) -> list[tuple[float, tuple[Any, ...]]]:
    """Merge the cells of smallest expectation until every cell reaches the floor (or one is left)."""
    first, *ordered = sorted(cells, key=lambda cell: cell[0])
    while ordered and min(first[0], ordered[0][0]) < _MIN_EXPECTED:
        expected, observed = ordered.pop(0)
        first = first[0] + expected, tuple(x + y for x, y in zip(first[1], observed, strict=True))
    return [first, *ordered]


def detectable_distance(num_each: int, df: int, alpha: float = 1e-3) -> float:
    """Return the total variation distance that :func:`homogeneity` detects with about 90 % power for this sample size.

    From the normal approximation of the noncentral chi-square, for a difference spread evenly over the cells (the
    hardest case for a given distance: w = 2 TV, noncentrality = n w^2 / 2).
    """
    z_alpha, z_power = normal_quantile(1.0 - alpha), normal_quantile(0.9)
    df = max(df, 1)
    # the mean shift that lifts the statistic above its threshold; its spread grows with the shift, hence the iteration
    shift = 0.0
    for _ in range(50):
        shift = max(0.0, z_alpha * math.sqrt(2.0 * df) + z_power * math.sqrt(2.0 * (df + 2.0 * shift)))
    return 0.5 * math.sqrt(2.0 * shift / num_each)
