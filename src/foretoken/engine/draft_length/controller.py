"""How long to draft: maximise expected tokens per second from measured costs.

A step that emits K tokens in time S has rate E[K] / E[S]. Adding one more draft node raises E[K] by the probability P
that the node (and all above it) stands, and E[S] by the cost c of drafting and verifying one more row. For a ratio of
expectations that pays exactly when P / c exceeds the best achievable rate r (Dinkelbach's rule), so a draft grows
while P > r * c. Everything in the rule is measured:

* P: the drafter's own confidences along the path, each corrected by how often nodes of that confidence really stood;
* c: the time of one more row of the verification, plus the slope of the drafting time over nodes
  (engine/draft_length/step_costs.py);
  the cost of drafting before its first node is charged to the first node, shared over a draft of the usual length;
* r: emitted tokens over wall time, exponentially forgotten; the rule's own result, so it settles at its fixed point.
  Plain decoding's rate is achievable, so r is never less.

A token is worth more to the requests that will run longest than to the others (engine/draft_length/draft_ledger.py
has the weights w), so in a batch a node is worth w * P, and r counts such tokens, too.

Some costs show in no slope: a drafter has to read the text, and may spend time before it knows that it has nothing
to propose. So the requests that get drafts are chosen first, by what drafting gained for them so far
(engine/draft_length/draft_ledger.py).

Acceptance cannot be seen while nothing is drafted, nor a row's cost: so now and then one request drafts against the
rule, when the exploration budget allows it. Until it does, the controller rests for a few steps at a time: its own
arithmetic is two percent of a small model's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.draft import Draft
from foretoken.core.stop_rule import Outlook, StopRule
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.confidence import Confidence, Reaches
from foretoken.engine.draft_length.draft_ledger import Candidate, Worth
from foretoken.engine.draft_length.moving_averages import LATE
from foretoken.engine.draft_length.step_costs import Reading, StepCosts

_KEEPS = 0.95  # of the rate, per step
_PROBE_EVERY = 32  # after so many empty drafts in a row, draft once anyway: the text may have become predictable
_PROBE_NODES = 2  # of a probe


class Controller:
    """Measures, and answers the two questions of a step: which requests get drafts, and how long these are.

    Args:
        reading: what the drafter's reading of a token costs, in tokens of plain decoding, by arithmetic.
    """

    def __init__(self, reading: float = 0.0) -> None:
        self.confidence = Confidence()
        self._reading = Reading(reading)
        self._worth = Worth(self._reading)
        self._regimes: dict[int, _Regime] = {}  # by the magnitude of the number of requests
        self._rest = _Rest(0, 0)
        self._empty_steps = self._num_probes = 0
        self._probing = False
        self._next_gain = self._first_gain = 0.0  # what the first node must promise, and each later one

    @property
    def resting(self) -> bool:
        """Whether no request is drafted for in this step, so that nothing need be measured."""
        return self._rest.resting

    def rests(self, num_requests: int) -> bool:
        """Called once before a step of so many requests: whether none of them gets a draft."""
        rest = self._rest
        rest.resting = rest.done < rest.steps and rest.num_requests.bit_length() == num_requests.bit_length()
        if rest.resting:
            rest.done += 1
            rest.tokens += num_requests
        elif rest.done:
            self._worth.rested(rest.tokens, rest.num_requests)
            rest.done = rest.steps = rest.tokens = 0
        return rest.resting

    @property
    def why_undrafted(self) -> str:
        """Why nothing has been drafted, in words; call it only if so."""
        if self._worth.found_slower:
            return "drafts were tried, and plain decoding was faster"
        if self._worth.total_asked:
            return "the drafter was called and proposed nothing"
        if not any(regime.costs.known for regime in self._regimes.values()):
            return "the answers ended before a plain step had been timed, which comes first"
        return "to find out whether drafts pay would have cost more than answers of this length can gain"

    def hopeless(self, request: Candidate, num_requests: int) -> bool:
        """Whether nothing will be drafted for a request that begins now, among so many."""
        return self._worth.hopeless(request, num_requests)

    def choose(
        self, requests: Sequence[Candidate], num_requests: int, *, queued: bool = False
    ) -> list[StopRule | None]:
        """Called once before drafting, unless it rests: the rules that requests draft by; None: nothing is drafted.

        Args:
            num_requests: that decode in this step, the others included.
            queued: whether others wait for their places.
        """
        regime = self._regime(num_requests)
        asked = self._worth.choose(requests, num_requests, regime.costs, queued=queued)
        self._probing = False
        if not self._worth.num_asked:
            self._rest = _Rest(num_requests, self._worth.rest)
            return [None] * len(requests)
        drafting = regime.costs.drafting
        rate = max(regime.rate, 1.0 / regime.costs.token(num_requests))
        row = max(0.0, regime.costs.row(num_requests))
        self._next_gain = rate * (drafting.slope + row)
        self._first_gain = self._next_gain + rate * drafting.intercept / max(1.0, drafting.mean)
        self._probing = not regime.costs.row_known
        if self._empty_steps >= _PROBE_EVERY:
            probe = drafting.at(_PROBE_NODES) + _PROBE_NODES * row
            self._probing |= self._worth.affords(probe / regime.costs.token(num_requests))
        weights = [each.ledger.weight for each in requests]
        rules: list[StopRule | None] = [
            _Rule(self, weight) if asks else None for asks, weight in zip(asked, weights, strict=True)
        ]
        if self._probing:  # one of them, each time another
            places = [place for place, asks in enumerate(asked) if asks]
            place = places[self._num_probes % len(places)]
            rules[place] = _Rule(self, weights[place], _PROBE_NODES)
            self._num_probes += 1
        return rules

    def pays(self, stands: float, num_nodes: int) -> bool:
        """True if one more node pays that gains so many tokens in the mean, drafting and verification counted."""
        return stands > (self._next_gain if num_nodes else self._first_gain)

    def outlook(self, weight: float, least: int) -> Outlook:
        """How a draft's rule is going to decide, but for its first ``least`` nodes."""
        return Outlook(self.confidence.by_tenth(), self._first_gain / weight, self._next_gain / weight, least)

    def measure(
        self,
        *,
        num_requests: int,
        nodes: int,
        accepted: int,
        draft: float,
        total: float,
        gained: float | None = None,
        prompts: bool = False,
    ) -> None:
        """Take in one step.

        Args:
            num_requests: that decoded.
            nodes, accepted: draft nodes that were put to the test, and those that stood.
            draft, total: seconds of drafting, and of the whole step.
            gained: what those that stood are worth, each by its request's weight; None: one each.
            prompts: whether it read prompts, too: then the step's time says nothing about decoding.
        """
        regime, worth = self._regime(num_requests), self._worth
        gained = accepted if gained is None else gained
        costs = regime.costs
        if costs.known:
            plain = costs.token(num_requests)
            expected = costs.drafting.at(nodes) + worth.backlog * self._reading.token(plain)
            if costs.drafting.seen:
                draft = min(draft, LATE * max(expected, plain))
            if not prompts:
                total = min(total, draft + LATE * (num_requests + nodes) * plain)
        if worth.backlog:
            if costs.drafting.seen:
                self._reading.measure(worth.backlog, draft - costs.drafting.at(nodes))
            elif costs.known:  # the drafting is part of it; still, what arithmetic says may be far more
                self._reading.measure(worth.backlog, min(draft, worth.backlog * self._reading.token(plain)))
        elif nodes:
            if self._probing:
                costs.drafting.move(nodes, draft)
            if not self._probing or not costs.drafting.seen:
                costs.drafting.add(nodes, draft)
        if not nodes:
            self._empty_steps += worth.num_asked > 0
        elif not self._probing or accepted < nodes:  # a probe that stands calls for another one
            self._empty_steps = 0
        if not prompts:
            costs.measure(num_requests, nodes, total - draft)
            regime.add(num_requests + gained, total)
        worth.measure(
            num_requests,
            costs,
            nodes=nodes,
            accepted=gained,
            draft=draft,
            total=total,
            typical=not (self._probing and nodes),  # an empty draft counts
        )

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Compare the drafter's confidences with acceptance."""
        self.confidence.learn(draft, verdict)

    def ended(self, num_tokens: int) -> None:
        """Take in the length of an answer."""
        self._worth.ended(num_tokens)

    def _regime(self, num_requests: int) -> _Regime:
        return self._regimes.setdefault(num_requests.bit_length(), _Regime())


@dataclass(slots=True)
class _Rest:
    """Steps without drafts, with about as many decoding requests and no change in their times.

    Attributes:
        num_requests: that decoded in the step before.
        steps, done: how many there may be, and how many there were.
        tokens: that were decoded in those.
        resting: whether this step is one of them.
    """

    num_requests: int
    steps: int
    done: int = 0
    tokens: int = 0
    resting: bool = False


class _Rule(StopRule):
    """The stop rule of one draft (:class:`foretoken.core.stop_rule.StopRule`).

    Args:
        weight: what a token is worth to the request.
        least: nodes that are drafted whatever they promise.
    """

    __slots__ = ("_controller", "_least", "_reaches", "_weight")

    def __init__(self, controller: Controller, weight: float, least: int = 0) -> None:
        self._controller = controller
        self._reaches = Reaches(controller.confidence)
        self._weight = weight
        self._least = least

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        gained = self._weight * self._reaches.stands(reach, confidence)
        return num_nodes < self._least or self._controller.pays(gained, num_nodes)

    def outlook(self) -> Outlook:
        return self._controller.outlook(self._weight, self._least)


class _Regime:
    """Steps of a like number of requests: their costs, and tokens per second."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._steps = self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Take in one step."""
        if self._steps:
            seconds = min(seconds, LATE * self._seconds / self._steps)
        self._steps = self._steps * _KEEPS + 1.0
        self._tokens = self._tokens * _KEEPS + tokens
        self._seconds = self._seconds * _KEEPS + seconds

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self._tokens / self._seconds if self._seconds else 0.0
