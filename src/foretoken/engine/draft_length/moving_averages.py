"""Exponential moving averages: a mean, and a straight line through observations."""

LATE = 5.0  # a time so many times the expected one is cut there: the machine was busy with something else
KEPT = 4.0  # observations that a mean of a former run stands for: soon outweighed by what this run sees
_DOUBT = (0.07 / 0.25) ** 2  # a time's spread over that of the slope beforehand, both as shares of the mean


class Mean:
    """A mean of observations, forgotten exponentially.

    Args:
        keeps: the share of the old weight that stays with every further observation.

    Attributes:
        weight: of the remembered observations.
    """

    __slots__ = ("_keeps", "_sum", "weight")

    def __init__(self, keeps: float) -> None:
        self._keeps = keeps
        self._sum = self.weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take in one observation."""
        self._sum = self._sum * self._keeps + value * weight
        self.weight = self.weight * self._keeps + weight

    def recall(self, value: float, weight: float = KEPT) -> None:
        """Begin with the mean of a former run, as if it were of so many observations."""
        self._sum, self.weight = value * weight, weight

    @property
    def value(self) -> float:
        """The mean; 0 before the first observation."""
        return self._sum / self.weight if self.weight else 0.0


class Line:
    """A least-squares line through (count, seconds); slope and intercept are never negative.

    While the counts are equal, or nearly, no slope can be seen: then the prior slope is kept.

    Args:
        keeps: the share of the old weight that stays with every further observation.
        believed: the slope beforehand, as a share of the mean seconds per unit: 1 is a line through the origin.
    """

    __slots__ = ("_believed", "_keeps", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, keeps: float, believed: float) -> None:
        self._keeps = keeps
        self._believed = believed
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, count: int, seconds: float) -> None:
        """Take in one observation."""
        if self._n:
            seconds = min(seconds, LATE * max(self.at(count), self._y / self._n))
        keeps = self._keeps
        self._n = self._n * keeps + 1
        self._x = self._x * keeps + count
        self._y = self._y * keeps + seconds
        self._xx = self._xx * keeps + count * count
        self._xy = self._xy * keeps + count * seconds

    def move(self, count: int, seconds: float) -> None:
        """Move the whole line half of the way to one observation, where the counts seen now are too equal for a fit."""
        expected = self.at(count)
        if expected > 0.0:
            factor = min(LATE, max(1.0 / LATE, seconds / expected)) ** 0.5
            self._y *= factor
            self._xy *= factor

    def at(self, count: float) -> float:
        """Seconds expected of that count."""
        if not self._n:
            return 0.0
        slope = self.slope
        return max(0.0, (self._y - slope * self._x) / self._n) + slope * count

    @property
    def seen(self) -> bool:
        """Whether there was any observation."""
        return self._n > 0.0

    @property
    def mean(self) -> float:
        """The mean count."""
        return self._x / self._n if self._n else 0.0

    @property
    def slope(self) -> float:
        """Seconds per additional unit."""
        if not self._x:
            return 0.0
        mean = self._x / self._n
        weight = _DOUBT * mean * mean
        spread = self._xx - self._x * mean
        together = self._xy - self._y * mean
        return max(0.0, (together + weight * self._believed * self._y / self._x) / (spread + weight))

    @property
    def intercept(self) -> float:
        """Seconds before the first unit."""
        return max(0.0, (self._y - self.slope * self._x) / self._n) if self._n else 0.0
