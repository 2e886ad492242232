"""The number of steps to guess before a search verifies them (OS3), from measured costs and the rate of right guesses.

a            seconds of one step: ``every`` tokens, and a cache lookup
b0 + b1 s    seconds of one search of s queries
gamma        probability that a guess is right

verified steps     (1 - gamma^s) / (1 - gamma)        their number per second is maximised
seconds            s a + b(s)                         sequential
                   (s - 1) a + max(a, b(s))           with one step during the search, if all guesses are right
"""

from __future__ import annotations

from foretoken_lab.rag.config import MOST_STRIDE

_KEEPS = 0.9  # weight of older observations, at each new one
_PRIOR = 1.0  # prior counts of right and wrong guesses
_EXPLORES = 6  # every so many rounds another stride is tried: costs of strides that are not taken are forgotten


def best_stride(
    gamma: float, step: float, search: tuple[float, float], *, asynchronous: bool, most: int = MOST_STRIDE
) -> int:
    """Return the stride with the most verified steps per second; of equal ones the shortest.

    Args:
        gamma: below 1.
        step: a.
        search: b0 and b1.
        asynchronous: whether one step runs during the search.
        most: longest stride.
    """
    return max(range(1, most + 1), key=lambda s: (_rate(s, gamma, step, search, asynchronous), -s))


def _rate(s: int, gamma: float, step: float, search: tuple[float, float], asynchronous: bool) -> float:
    b = search[0] + search[1] * s
    in_a_row = s * step + b
    right = gamma**s
    beside = (s - 1) * step + max(step, b)
    seconds = right * beside + (1.0 - right) * in_a_row if asynchronous else in_a_row
    stands = (1.0 - right) / (1.0 - gamma)
    return stands / max(seconds, 1e-12)


class Strides:
    """Chooses strides for all requests of a process. Texts do not depend on the stride.

    Paper:   arXiv:2401.14021, the optimal speculation stride scheduler.
    Differs: b grows with the number of queries; the paper assumes a constant, which never keeps it from a longer
             stride. So every sixth round takes twice or half the best stride: one slow search would be the only
             measurement of long strides for a long time. gamma is the mean of a Beta posterior over all guesses
             instead of the last five rounds', capped at 0.6.

    Args:
        fixed: a constant stride; None: adaptive, starting with 1.
        asynchronous: see :func:`best_stride`.
    """

    def __init__(self, fixed: int | None, *, asynchronous: bool) -> None:
        self._fixed = fixed
        self._asynchronous = asynchronous
        self._right = self._wrong = _PRIOR
        self._rounds = 0
        self._step: float | None = None
        self._weight = self._s = self._b = self._ss = self._sb = 0.0

    @property
    def gamma(self) -> float:
        """The rate of right guesses."""
        return self._right / (self._right + self._wrong)

    @property
    def step_seconds(self) -> float | None:
        """a; None before the first step."""
        return self._step

    @property
    def search_seconds(self) -> tuple[float, float]:
        """b0 and b1: least squares over the measurements, none of them below 0."""
        if not self._weight:
            return 0.0, 0.0
        s, b = self._s / self._weight, self._b / self._weight
        spread = self._ss / self._weight - s * s
        slope = (self._sb / self._weight - s * b) / spread if spread > 1e-9 else 0.0
        slope = min(max(slope, 0.0), b / s)
        return b - slope * s, slope

    def next(self) -> int:
        """Return the stride of the next round."""
        if self._fixed is not None:
            return self._fixed
        if self._step is None or not self._weight:
            return 1
        best = best_stride(self.gamma, self._step, self.search_seconds, asynchronous=self._asynchronous)
        self._rounds += 1
        explored, later = divmod(self._rounds, _EXPLORES)
        if later:
            return best
        return min(2 * best, MOST_STRIDE) if explored % 2 else max(1, best // 2)

    def stepped(self, seconds: float) -> None:
        """Record one step."""
        self._step = seconds if self._step is None else _KEEPS * self._step + (1.0 - _KEEPS) * seconds

    def searched(self, queries: int, seconds: float) -> None:
        """Record one search."""
        for name, value in (
            ("_weight", 1.0),
            ("_s", queries),
            ("_b", seconds),
            ("_ss", queries * queries),
            ("_sb", queries * seconds),
        ):
            setattr(self, name, _KEEPS * getattr(self, name) + value)

    def judged(self, right: int, wrong: bool) -> None:
        """Record the number of right guesses before the first wrong one, if there was one."""
        self._right += right
        self._wrong += wrong
