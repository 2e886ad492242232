"""Fitting y = a log(x / unit) + b, with the base and the unit next to the coefficients, and saying how far to trust it.

Paper: arXiv:2505.07858, the distributions of data and depth, and the throughput that grows with log2 of the batch.
Differs: the paper's coefficients contradict the base that it states, so none of them is used; every fit stores its own,
its residuals, its coefficients without any one point, and its prediction of the largest point from the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEAST_POINTS = 4
_SATURATES = 0.5  # of the residual sum, which a quadratic term has to take away
_RELATIVE = 1e-6  # by which stored numbers may differ from what the points give


@dataclass(frozen=True)
class Law:
    """The functional form to fit.

    Attributes:
        name: for the record.
        form: in words, with x and its unit.
        unit: of x: x is divided by it before the logarithm.
        unit_name: of it.
        base: of the logarithm.
    """

    name: str
    form: str
    unit: float
    unit_name: str
    base: float

    def log(self, x: float) -> float:
        """Of x in its unit."""
        return math.log(x / self.unit) / math.log(self.base)


DATA = Law("data", "A = a ln(T / 1e9) + b, T training tokens", 1e9, "1e9 tokens", math.e)
CAPACITY = Law("capacity", "A = a ln(D) + b, D decoder layers", 1.0, "layers", math.e)
BATCH = Law("batch", "tokens per second = a log2(b) + b0, b requests at once", 1.0, "requests", 2.0)
LAWS = {law.name: law for law in (DATA, CAPACITY, BATCH)}


@dataclass(frozen=True)
class Fit:
    """One distribution over measured points.

    Attributes:
        law: its name.
        base, unit: of the logarithm and of x; without them the coefficients mean nothing.
        a, b: coefficients.
        r2: share of the variance that it explains; None if there is none.
        xs, ys, residuals: the points, and y - fitted of each.
        without_one: (least, most) of a and of b over all fits without one point.
        curvature: what a quadratic term in the logarithm has for a coefficient.
        saturates: that term bends the distribution down, and takes away more than half of the residual sum.
        knee: x where the bent distribution stops growing, if it saturates; a bend that comes to no number is rounding.
        held_out: the largest x: measured, predicted from the others, and the difference.
    """

    law: str
    form: str
    base: float
    unit: float
    unit_name: str
    a: float
    b: float
    r2: float | None
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    residuals: tuple[float, ...]
    without_one: Mapping[str, tuple[float, float]]
    curvature: float
    saturates: bool
    knee: float | None
    held_out: Mapping[str, float]

    def at(self, x: float) -> tuple[float, str]:
        """Its prediction at x, and a warning; "" if there is none."""
        warning = ""
        if not min(self.xs) <= x <= max(self.xs):
            warning = f"{x:g} lies outside of the measured range, {min(self.xs):g} to {max(self.xs):g}"
        if self.saturates:
            warning = (warning + "; " if warning else "") + f"the distribution saturates near {self.knee:g}"
        return self.a * math.log(x / self.unit) / math.log(self.base) + self.b, warning

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def fit_log(law: Law, xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """Least squares.

    Args:
        xs: positive, different, four at least; ys: measured.
    Raises:
        ValueError: there are too few points, or one has no logarithm.
    """
    if len(xs) != len(ys) or len(set(xs)) != len(xs) or len(xs) < LEAST_POINTS:
        raise ValueError(
            f"the distribution '{law.name}' needs {LEAST_POINTS} different points at least, there are {len(set(xs))}"
        )
    if not all(x > 0 and math.isfinite(x) and math.isfinite(y) for x, y in zip(xs, ys, strict=True)):
        raise ValueError(f"the distribution '{law.name}': every point needs a positive x and a finite y")
    points = sorted(zip((float(x) for x in xs), (float(y) for y in ys), strict=True))
    logs, values = [law.log(x) for x, _ in points], [y for _, y in points]
    a, b = _line(logs, values)
    residuals = [y - (a * log + b) for log, y in zip(logs, values, strict=True)]
    total, left = _squares([y - sum(values) / len(values) for y in values]), _squares(residuals)
    others = [_line([*logs[:i], *logs[i + 1 :]], [*values[:i], *values[i + 1 :]]) for i in range(len(points))]
    square, slope, bent = _parabola(logs, values)
    knee = None
    if square < 0 and left > 1e-18 * max(1.0, total) and bent < (1 - _SATURATES) * left:
        knee = _at_log(law, -slope / (2 * square))
    held_a, held_b = others[-1]
    predicted = held_a * logs[-1] + held_b
    return Fit(
        law=law.name,
        form=law.form,
        base=law.base,
        unit=law.unit,
        unit_name=law.unit_name,
        a=a,
        b=b,
        r2=1 - left / total if total > 0 else None,
        xs=tuple(x for x, _ in points),
        ys=tuple(values),
        residuals=tuple(residuals),
        without_one={
            "a": (min(each[0] for each in others), max(each[0] for each in others)),
            "b": (min(each[1] for each in others), max(each[1] for each in others)),
        },
        curvature=square,
        saturates=knee is not None,
        knee=knee,
        held_out={"x": points[-1][0], "measured": values[-1], "predicted": predicted, "error": values[-1] - predicted},
    )


def contradictions(stored: Mapping[str, Any]) -> list[str]:
    """What a stored fit says that its own points do not give; empty: everything can be recomputed.

    Args:
        stored: :meth:`Fit.fields`, perhaps read from JSON.
    """
    law = LAWS.get(str(stored.get("law")))
    if law is None:
        return [f"law={stored.get('law')!r}"]
    found = [
        f"{name}={stored.get(name)!r}, but this distribution has {getattr(law, name):g}"
        for name in ("base", "unit")
        if not _close(stored.get(name), getattr(law, name))
    ]
    again = fit_log(law, stored["xs"], stored["ys"]).fields()
    found += [
        f"{name}={stored.get(name)!r}, but the points give {value!r}"
        for name, value in again.items()
        if name not in ("law", "base", "unit") and not _same(stored.get(name), value)
    ]
    return found


def _at_log(law: Law, power: float) -> float | None:
    """x of a logarithm; None where it is too large or too small for a number."""
    try:
        found = law.unit * law.base**power
    except OverflowError:
        return None
    return found if 0 < found < math.inf else None


def _close(one: Any, other: float) -> bool:
    return isinstance(one, int | float) and math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-9)


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a fit are the same, numbers within rounding; JSON has lists where a fit has tuples."""
    if isinstance(other, Mapping):
        return isinstance(one, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in other)
    if isinstance(other, tuple):
        return isinstance(one, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(other, bool) or not isinstance(other, int | float):
        return one is other or one == other
    return not isinstance(one, bool) and _close(one, other)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / _squares([x - x0 for x in xs])
    return slope, y0 - slope * x0


def _parabola(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Coefficients of x^2 and x, and the sum of squares that is left."""
    x0 = sum(xs) / len(xs)
    line, const = _line(xs, ys)
    squares = [(x - x0) ** 2 for x in xs]
    bend, offset = _line(xs, squares)
    apart = [s - (bend * x + offset) for s, x in zip(squares, xs, strict=True)]  # of x^2, what no line explains
    left = [y - (line * x + const) for x, y in zip(xs, ys, strict=True)]
    square = sum(s * r for s, r in zip(apart, left, strict=True)) / _squares(apart)
    rest = _squares([r - square * s for s, r in zip(apart, left, strict=True)])
    return square, line - square * bend - 2 * square * x0, rest


def _squares(values: Sequence[float]) -> float:
    return sum(value * value for value in values)
