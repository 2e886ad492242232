"""How long to draft for a seeded request: from its own past and from costs that are known beforehand.

Where drafted tokens are drawn, how many of them there are shifts every later draw. A length that follows measured
times, or what other requests taught, would so give other tokens for the same seed in another batch or process. The
rule is the controller's (engine/draft_length/controller.py), P > r * c, from other sources:

* P: the drafter's confidences along the path, each corrected by how often nodes of that confidence stood in this
  request;
* c: a node's cost in plain steps, by arithmetic: the draft model's operations per token over the target's, and a fixed
  share for its row of the verification;
* r: this request's emitted tokens over the costs of its steps.
"""

from collections.abc import Sequence
from copy import copy
from math import prod

from foretoken.core.draft import Draft
from foretoken.core.stop_rule import Outlook, StopRule
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.confidence import Confidence, Reaches

ROW_COST = 0.05  # of one more row of the verification, in plain steps; not measured, so that it is the same everywhere
_DECAY = 0.95  # of the rate, per step
_PROBE_EVERY = 32  # after so many empty drafts in a row, draft once anyway: the text may have become predictable


class OwnPastRule(StopRule):
    """The stop rule of one request (:class:`foretoken.core.stop_rule.StopRule`).

    Args:
        node_cost: of one drafted and verified token, in plain steps.
    """

    def __init__(self, node_cost: float) -> None:
        self._node_cost = node_cost
        self._confidence = Confidence()
        self._reaches = Reaches(self._confidence)
        self._tokens = self._cost = self._reach = 1.0
        self._empty_steps = 0

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """True if one more node of that confidence, under a parent reached with that probability, pays."""
        stands = self._reaches.stands(reach, confidence)
        if self._empty_steps >= _PROBE_EVERY and num_nodes < 2 and self._reach == 1.0:
            return True
        return self._reach * stands > self._node_cost * self._tokens / self._cost

    def after(self, first: StopRule, confidence: Sequence[float]) -> "OwnPastRule":
        found = copy(self)
        found._reaches, found._reach = Reaches(self._confidence), prod(map(self._confidence.stands, confidence))
        return found

    def outlook(self) -> Outlook | None:
        least = self._node_cost * self._tokens / self._cost
        return Outlook(self._confidence.by_tenth(), least, least, 2 if self._empty_steps >= _PROBE_EVERY else 0)

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in one decoding step, also one without a draft."""
        self._confidence.learn(draft, verdict)
        self._reaches = Reaches(self._confidence)  # of the next draft
        self._tokens = self._tokens * _DECAY + len(verdict.path) + 1
        self._cost = self._cost * _DECAY + 1.0 + self._node_cost * len(draft)
        self._empty_steps = 0 if len(draft) else self._empty_steps + 1
