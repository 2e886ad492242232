"""How long to draft: maximise expected tokens per second from what was measured.

A step that emits K tokens in time S has rate E[K] / E[S]. Adding one more draft node raises E[K] by the probability P
that the node (and all above it) stands, and E[S] by the cost c of drafting and verifying one more row. For a ratio of
expectations that pays exactly when P / c exceeds the best achievable rate r (Dinkelbach's rule), so a draft grows
while P > r * c. Everything in the rule is measured:

* P: the drafter's own confidence, corrected by how often nodes of that confidence really stood;
* c: the slope of the verification time over rows, plus that of the drafting time over nodes; what drafting costs
  before its first node is asked of the first node, shared over a draft of the usual length;
* r: emitted tokens over wall time, exponentially forgotten; the rule's own result, so it settles at its fixed point.

Some costs show in no slope: a drafter may spend time before it can tell that it has nothing to propose, and its weights
push the target's out of the processor's cache. So whether the drafter is asked at all is decided by the plainest of
measurements: tokens per second of steps that asked it against those of steps that did not, for a like number of
requests. The slower way gets a short turn now and then, in case the text has changed.

Acceptance cannot be seen while nothing is drafted: so now and then a draft is made against the rule, rarely enough to
cost about one percent. Nor can a slope while every draft is equally long: then the mean time per unit stands in for it;
that is too much, so drafts get shorter until their lengths differ.
"""

from __future__ import annotations

import math

from foretoken.core.draft import Draft
from foretoken.core.verdict import Verdict
from foretoken.engine.confidence import Confidence

_DECAY = 0.95  # of the rate, per step
_SLOW = 0.99  # of costs, and of the rates of the two ways
_FAST = 0.8  # of costs while probing: drafts are rare then, and what they tell is news
_PROBE_EVERY = 32  # after so many empty drafts in a row, draft once anyway: the text may have become predictable
_LATE = 5.0  # a time so many times the expected one is cut there: the machine was busy with something else
_TRIALS = 16  # drafting is not given up before so many steps of it
_PLAIN_TURN = 1, 64  # while drafting is the faster way: so many plain steps in every so many,
_DRAFT_TURN = 5, 64  # else so many with drafts; a draft model then reads what it has missed, which costs too


class Controller:
    """Measures, and answers the one question of :class:`foretoken.core.protocols.StopRule`."""

    def __init__(self) -> None:
        self.confidence = Confidence()
        self._verify = _Line()
        self._draft = _Line()
        self._steps = self._tokens = self._seconds = 0.0  # of all steps
        self._ways: dict[int, tuple[_Rate, _Rate]] = {}  # plain and asked, by the magnitude of the number of requests
        self._way = _Rate()  # of this step
        self._asks = True
        self._num_steps = 0
        self._empty_steps = 0
        self._first_gain = 0.0  # what the first node must promise, and each later one
        self._next_gain = 0.0
        self.probing = False

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """True if one more node of that confidence, under a parent reached with that probability, pays."""
        if self.probing and num_nodes < 2:
            return True
        return reach * self.confidence.stands(confidence) > (self._next_gain if num_nodes else self._first_gain)

    def plan(self, num_requests: int = 1) -> None:
        """Called once before drafting: decide whether to ask at all, and refresh the threshold r * c."""
        self._num_steps += 1
        plain, asked = self._ways.setdefault(num_requests.bit_length(), (_Rate(), _Rate()))
        self._asks = self._asking_pays(plain, asked)
        self._way = asked if self._asks else plain
        self.probing = self._asks and self._empty_steps >= _PROBE_EVERY
        rate = self._tokens / self._seconds if self._seconds else 0.0
        draft = self._draft
        self._next_gain = rate * (draft.slope + self._verify.slope) if self._asks else math.inf
        self._first_gain = self._next_gain + rate * draft.intercept / max(1.0, draft.mean)

    def _asking_pays(self, plain: _Rate, asked: _Rate) -> bool:
        """Whether this step asks the drafter: as the faster way so far has it, or because the other has its turn."""
        if asked.steps < _TRIALS:
            return True
        if plain.steps < _TRIALS // 4:
            return False
        drafting_is_faster = asked.value > plain.value
        turn, period = _PLAIN_TURN if drafting_is_faster else _DRAFT_TURN
        return (self._num_steps % period < turn) != drafting_is_faster

    def measure(self, *, rows: int, nodes: int, tokens: int, draft: float, verify: float, total: float) -> None:
        """Take in one pure decoding step.

        Args:
            rows: rows of the verification, over all requests.
            nodes: draft nodes among them.
            tokens: tokens emitted.
            draft, verify, total: seconds.
        """
        self._verify.add(rows, verify)
        stood = tokens - (rows - nodes)
        if not nodes:
            self._empty_steps += self._asks
        else:
            if self.probing:
                self._draft.scale(nodes, draft)
            else:
                self._draft.add(nodes, draft)
            if not self.probing or stood < nodes:  # a probe that stands calls for another one
                self._empty_steps = 0
        if self._steps:
            total = min(total, _LATE * self._seconds / self._steps)
        self._way.add(tokens, total)
        self._steps = self._steps * _DECAY + 1.0
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + total

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Compare the drafter's confidences with what stood."""
        self.confidence.learn(draft, verdict)


class _Rate:
    """Tokens per second of one way of decoding, slowly forgotten."""

    def __init__(self) -> None:
        self.steps = 0
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take in one step."""
        self.steps += 1
        self._tokens = self._tokens * _SLOW + tokens
        self._seconds = self._seconds * _SLOW + seconds

    @property
    def value(self) -> float:
        """Tokens per second."""
        return self._tokens / self._seconds if self._seconds else 0.0


class _Line:
    """A forgetful least-squares line through (count, seconds); slope and intercept are never negative."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, count: int, seconds: float) -> None:
        """Take in one observation."""
        if self._n:
            seconds = min(seconds, _LATE * max(self.intercept + self.slope * count, self._y / self._n))
        self._n = self._n * _SLOW + 1
        self._x = self._x * _SLOW + count
        self._y = self._y * _SLOW + seconds
        self._xx = self._xx * _SLOW + count * count
        self._xy = self._xy * _SLOW + count * seconds

    def scale(self, count: int, seconds: float) -> None:
        """Move the whole line towards one observation: the counts seen now are too few and too equal for a fit."""
        expected = self.intercept + self.slope * count
        if expected > 0.0:
            factor = min(_LATE, max(1.0 / _LATE, seconds / expected)) ** (1.0 - _FAST)
            self._y *= factor
            self._xy *= factor

    @property
    def mean(self) -> float:
        """The mean count."""
        return self._x / self._n if self._n else 0.0

    @property
    def slope(self) -> float:
        """Seconds per additional unit; the mean seconds per unit until two counts were seen."""
        if not self._x:
            return 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread < 1e-6 * self._n * self._n:
            return self._y / self._x
        return max(0.0, (self._n * self._xy - self._x * self._y) / spread)

    @property
    def intercept(self) -> float:
        """Seconds before the first unit."""
        return max(0.0, (self._y - self.slope * self._x) / self._n) if self._n else 0.0
