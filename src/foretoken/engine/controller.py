"""How long to draft: maximise expected tokens per second from what was measured.

A step that emits K tokens in time S has rate E[K] / E[S]. Adding one more draft node raises E[K] by the probability P
that the node (and all above it) stands, and E[S] by the cost c of drafting and verifying one more row. For a ratio of
expectations that pays exactly when P / c exceeds the best achievable rate r (Dinkelbach's rule), so a draft grows
while P > r * c. Everything in the rule is measured:

* P: the drafter's own confidence, corrected by how often nodes of that confidence really stood;
* c: the slope of the verification time over rows, plus the drafting time per node;
* r: emitted tokens over wall time, exponentially forgotten; the rule's own result, so it settles at its fixed point.
"""

from __future__ import annotations

from foretoken.core.draft import Draft
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict

_BINS = 10
_PRIOR = 4.0  # a bin starts as so many observations that agree with the drafter
_MEMORY = 400.0  # a bin forgets beyond so many observations
_DECAY = 0.95  # of running times and rates, per step
_PROBE_EVERY = 32  # after so many empty drafts in a row, draft once anyway: the text may have become predictable


class Controller:
    """Measures, and answers the one question of :class:`foretoken.core.protocols.Patience`."""

    def __init__(self) -> None:
        self._stood = [_PRIOR * (i + 0.5) / _BINS for i in range(_BINS)]
        self._seen = [_PRIOR] * _BINS
        self._verify = _Line()
        self._draft_seconds = 0.0
        self._draft_nodes = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._empty_steps = 0
        self._gain_needed = 0.0
        self.probing = False

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """True if one more node of that confidence, under a parent reached with that probability, pays."""
        if self.probing and num_nodes < 2:
            return True
        stands = self._stood[bin_of := _bin(confidence)] / self._seen[bin_of]
        return reach * stands > self._gain_needed

    def plan(self) -> None:
        """Called once before drafting: refresh the threshold r * c."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        per_node = self._draft_seconds / self._draft_nodes if self._draft_nodes else 0.0
        self._gain_needed = rate * (per_node + self._verify.slope)
        self.probing = self._empty_steps >= _PROBE_EVERY

    def measure(self, *, rows: int, nodes: int, tokens: int, draft: float, verify: float, total: float) -> None:
        """Take in one pure decoding step.

        Args:
            rows: rows of the verification, over all requests.
            nodes: draft nodes among them.
            tokens: tokens emitted.
            draft, verify, total: seconds.
        """
        self._verify.add(rows, verify)
        if nodes:
            self._draft_seconds = self._draft_seconds * _DECAY + draft
            self._draft_nodes = self._draft_nodes * _DECAY + nodes
            self._empty_steps = 0
        else:
            self._empty_steps += 1
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + total

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Compare the drafter's confidences with what stood: every child of an accepted node was put to the test."""
        if not draft.confidence:
            return
        accepted = set(verdict.path)
        for node, parent in enumerate(draft.tree.parents):
            if parent == ROOT or parent in accepted:
                index = _bin(draft.confidence[node])
                if self._seen[index] >= _MEMORY:
                    self._seen[index] *= 0.5
                    self._stood[index] *= 0.5
                self._seen[index] += 1.0
                self._stood[index] += node in accepted


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))


class _Line:
    """A forgetful least-squares line through (rows, seconds); its slope is never negative."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, rows: int, seconds: float) -> None:
        if self._n > 20 and seconds > 5 * self._y / self._n:
            return  # the machine was busy with something else
        decay = 0.99
        self._n = self._n * decay + 1
        self._x = self._x * decay + rows
        self._y = self._y * decay + seconds
        self._xx = self._xx * decay + rows * rows
        self._xy = self._xy * decay + rows * seconds

    @property
    def slope(self) -> float:
        """Seconds per additional row; a tenth of the mean time per row until two row counts were seen."""
        if not self._n:
            return 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread < 1e-6 * self._n * self._n:
            return 0.1 * self._y / max(self._x, 1.0)
        return max(0.0, (self._n * self._xy - self._x * self._y) / spread)
