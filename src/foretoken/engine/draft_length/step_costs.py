"""What the parts of a step cost, as multiples of each other: for steps of a like number of requests.

    rows        a step of n rows takes b (1 + k (n - m)), where m rows are the fewest; k follows from the ratio of a
                step's time to that of the steps just before it, wherever their numbers of rows differ
    drafting    by nodes, where the drafter had read everything before
    reading     what a drafter has not read yet, by tokens

b is the time of a step of m rows now, the mean of the last ten steps. Rows and drafting are counted in units of b. So a
slow hour of the machine, or a neighbour that comes and goes, changes b and nothing else.
"""

from foretoken.engine.draft_length.moving_averages import LATE, Mean

_KEEPS = 0.98
_NOW = 0.9  # kept by the means of the last steps
_LEAST_ROW = -0.1  # of a step: a drafter that computes some of the target's layers saves the verification that work
_DOUBT = 0.05  # a row is believed to cost what the others cost until any was measured; in squares of rows
_MEASURED = 8.0  # squared differences of rows after which its cost counts as measured
MIN_STEPS = 3  # before anything is weighed against a step


class StepCosts:
    """Costs of steps with a like number of requests.

    Args:
        fewest: requests.

    Attributes:
        num_steps: that were measured.
    """

    def __init__(self, fewest: int) -> None:
        self._fewest = fewest
        self.num_steps = 0
        self._seconds, self._rows = Mean(_NOW), Mean(_NOW)  # of the last steps; rows beyond the fewest
        self._squares = self._products = 0.0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to weigh others against them."""
        return self.num_steps >= MIN_STEPS

    @property
    def row_known(self) -> bool:
        """Whether a row's cost was measured at all."""
        return self._squares >= _MEASURED

    @property
    def row_told(self) -> bool:
        """Whether it was measured in this run, or in a former one."""
        return self._squares >= _MEASURED / 2.0

    @property
    def row(self) -> float:
        """The cost of one more row, in steps of the fewest; negative where drafting saves the verification work."""
        return max(_LEAST_ROW, (self._products + _DOUBT / self._fewest) / (self._squares + _DOUBT))

    @property
    def base(self) -> float:
        """Seconds of a step of the fewest rows."""
        return self._seconds.value / _times(self.row, self._rows.value)

    def recall(self, row: float) -> None:
        """Begin with the cost of a row of a former run; it still counts as not measured."""
        self._squares = _MEASURED / 2.0
        self._products = row * (self._squares + _DOUBT) - _DOUBT / self._fewest

    def token(self, num_requests: int) -> float:
        """The cost of a token by plain decoding, in steps of the fewest rows."""
        return _times(self.row, num_requests - self._fewest) / num_requests

    def measure(self, num_rows: int, seconds: float) -> None:
        """Take in a step that read no prompt.

        Args:
            seconds: that it took, except for drafting.
        """
        more = num_rows - self._fewest
        if self.known:
            mean, now, row = self._rows.value, self._seconds.value, self.row
            steps = _times(row, mean)
            seconds = min(seconds, LATE * now / steps * _times(row, more))
            if abs(more - mean) > 0.5:
                excess = (seconds / now - 1.0) * steps
                self._squares = self._squares * _KEEPS + (more - mean) ** 2
                self._products = self._products * _KEEPS + excess * (more - mean)
        self._seconds.add(seconds)
        self._rows.add(more)
        self.num_steps += 1


def _times(row: float, more: float) -> float:
    """Time of a step with so many more rows, in steps of the fewest."""
    return max(0.1, 1.0 + row * more)


class Reading:
    """Seconds that a drafter takes for a token that it has not read yet.

    Args:
        share: of a token of plain decoding, by arithmetic; it is believed until one was timed.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = Mean(_KEEPS)

    def token(self, plain: float) -> float:
        """Seconds for a token, where plain decoding takes so many."""
        return self._seconds.value if self._seconds.weight else self._share * plain

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Take in one reading."""
        self._seconds.add(max(0.0, seconds) / num_tokens, num_tokens)
