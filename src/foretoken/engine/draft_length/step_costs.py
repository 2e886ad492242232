"""What the parts of a step take, measured while decoding: for steps of a like number of requests.

    a step without drafts      by the number of requests; a request's share of it is the price of one token
    one more row               of the verification, next to what the requests' own rows take
    drafting                   by nodes, where the drafter had read everything before
    reading                    what a drafter has not read yet, by tokens

Times are compared as multiples of a step without drafts, so that a slow hour of the machine is no news. An additional
row is taken to cost what the others cost until that was measured: where it costs less, drafting pays later than it
could; where that is so, nothing is lost.
"""

from __future__ import annotations

from foretoken.engine.draft_length.moving_averages import LATE, Line, Mean

_KEEPS = 0.98
_NOISE = 1.0 / 7.0  # of a step's time, next to half of the mean row's, which is how well a row's is known beforehand
MIN_PLAIN_STEPS = 3  # steps without drafts before any are weighed against them


class StepCosts:
    """Costs of steps with a like number of requests.

    Attributes:
        drafting: seconds by nodes, over all requests.
        num_plain: steps without drafts so far.
    """

    def __init__(self) -> None:
        self.drafting = Line(_KEEPS, believed=1.0)
        self.num_plain = 0
        self._plain = Line(_KEEPS, believed=0.5)
        self._plain_at = 0, 0.0  # the last answer of it: it is read again and again for as many requests
        self._nodes_squared = self._nodes_times_excess = 0.0

    @property
    def known(self) -> bool:
        """Whether enough steps without drafts were seen to weigh others against them."""
        return self.num_plain >= MIN_PLAIN_STEPS

    @property
    def row_known(self) -> bool:
        """Whether a row's cost was measured at all."""
        return self._nodes_squared >= 8.0

    def token(self, num_requests: int) -> float:
        """Seconds that plain decoding takes for a token."""
        return self._step(num_requests) / num_requests

    def row(self, num_requests: int) -> float:
        """Seconds that one more row takes; negative where drafting saves the verification some of its own work."""
        share = 1.0 / num_requests
        weight = (_NOISE / share) ** 2
        excess = (self._nodes_times_excess + weight * share) / (self._nodes_squared + weight)
        return excess * self._step(num_requests)

    def measure(self, num_requests: int, nodes: int, seconds: float) -> None:
        """Take in a step that read no prompt.

        Args:
            seconds: that it took, but for drafting.
        """
        if not nodes:
            self.num_plain += 1
            self._plain.add(num_requests, seconds)
            self._plain_at = 0, 0.0
        elif self._plain.seen:
            plain = self._step(num_requests)
            excess = min(seconds - plain, LATE * nodes * max(self.row(num_requests), plain / num_requests)) / plain
            self._nodes_squared = self._nodes_squared * _KEEPS + nodes * nodes
            self._nodes_times_excess = self._nodes_times_excess * _KEEPS + nodes * excess

    def _step(self, num_requests: int) -> float:
        if self._plain_at[0] != num_requests:
            self._plain_at = num_requests, self._plain.at(num_requests)
        return self._plain_at[1]


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
