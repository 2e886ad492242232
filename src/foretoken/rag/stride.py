"""How many steps to guess before a search verifies them (OS3), from measured costs and the share of right guesses.

a            seconds of one step: ``every`` tokens, and a look into the cache
b0 + b1 s    seconds of one search of s queries
gamma        chance that a guess is right

steps that stand   (1 - gamma^s) / (1 - gamma)        of them per second: what is maximised
seconds            s a + b(s)                         in a row
                   (s - 1) a + max(a, b(s))           with one step next to the search, if all guesses are right
"""

from __future__ import annotations

from foretoken.rag.config import MOST_STRIDE

_KEEPS = 0.9  # of older observations, at each new one
_PRIOR = 1.0  # right and wrong guesses before any


def best_stride(
    gamma: float, step: float, search: tuple[float, float], *, asynchronous: bool, most: int = MOST_STRIDE
) -> int:
    """The stride with the most verified steps per second; of equal ones the shortest.

    Args:
        gamma: below 1.
        step: a.
        search: b0 and b1.
        asynchronous: whether one step runs next to the search.
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
    """Chooses strides for all requests of a process: no text depends on them.

    Paper:   arXiv:2401.14021, the optimal speculation stride scheduler.
    Differs: b grows with the number of queries, which the paper takes for constant; gamma is the mean of a Beta
             posterior over all guesses instead of the last five rounds', capped at 0.6.

    Args:
        fixed: a stride that is always taken; None adapts, from 1.
        asynchronous: see :func:`best_stride`.
    """

    def __init__(self, fixed: int | None, *, asynchronous: bool) -> None:
        self._fixed = fixed
        self._asynchronous = asynchronous
        self._right = self._wrong = _PRIOR
        self._step: float | None = None
        self._weight = self._s = self._b = self._ss = self._sb = 0.0

    @property
    def gamma(self) -> float:
        """Share of right guesses."""
        return self._right / (self._right + self._wrong)

    @property
    def step_seconds(self) -> float | None:
        """a; None before the first step."""
        return self._step

    @property
    def search_seconds(self) -> tuple[float, float]:
        """b0 and b1: least squares over what was measured, none of them below 0."""
        if not self._weight:
            return 0.0, 0.0
        s, b = self._s / self._weight, self._b / self._weight
        spread = self._ss / self._weight - s * s
        slope = (self._sb / self._weight - s * b) / spread if spread > 1e-9 else 0.0
        slope = min(max(slope, 0.0), b / s)
        return b - slope * s, slope

    def next(self) -> int:
        """The stride of the next round."""
        if self._fixed is not None:
            return self._fixed
        if self._step is None or not self._weight:
            return 1
        return best_stride(self.gamma, self._step, self.search_seconds, asynchronous=self._asynchronous)

    def stepped(self, seconds: float) -> None:
        """Take in one step."""
        self._step = seconds if self._step is None else _KEEPS * self._step + (1.0 - _KEEPS) * seconds

    def searched(self, queries: int, seconds: float) -> None:
        """Take in one search."""
        for name, value in (
            ("_weight", 1.0),
            ("_s", queries),
            ("_b", seconds),
            ("_ss", queries * queries),
            ("_sb", queries * seconds),
        ):
            setattr(self, name, _KEEPS * getattr(self, name) + value)

    def judged(self, right: int, wrong: bool) -> None:
        """Take in how many guesses were right before the first wrong one, if there was one."""
        self._right += right
        self._wrong += wrong
