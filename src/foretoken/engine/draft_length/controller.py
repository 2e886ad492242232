"""Whether to draft, and how long: a calibrated decision for every request and step.

How long. A draft of m nodes brings 1 + P_1 + ... + P_m tokens in the mean and takes 1 + a + m c, both in units of
plain decoding: P_i is the probability that node i and all above it are accepted, a the cost of asking the drafter and
c that of one node, drafted and verified. The draft grows while the next node's P / c exceeds the rate of the draft so
far, which makes the rate of this very step greatest. Nothing is carried over from other text.

    P    the drafter's own confidence (a copy's: the length of the match, and how often it occurred), corrected by how
         often nodes of that confidence were accepted in all requests (confidence.py), and by how often they were in
         this request (draft_ledger.py)
    a, c measured as ratios of neighbouring steps (step_costs.py)

Whether to ask. A drafter that looks up copies foretells the confidence in its first node at the cost of the look-up: it
is called where that node is expected to pay for its row and for the call, and where it did so in the mean before. What
another drafter finds is known only after it was called, and it has to read the text. So a request is drafted for where

    gain of a draft * steps to come  >  cost of reading what the drafter has not read yet

The gain is the request's own, shrunk to that of all requests. Where drafting is not expected to pay, it is tried all
the same, because the text may have changed: all requests together may lose 1/128 of the time on that, and each
another 1/512 of its own, which it may spend from its first step on. So the history of one request does not switch
the next one's drafts off where a call is cheap, as copying is, and drafting loses no more than this share, however
expensive the drafter. A request goes on while its own last drafts paid, whatever others brought. Until the
gain is believed, a few requests at a time may owe some tokens in advance: answers are short, and the first calls slow.

A token is worth more to the requests that will run longest: a step has a fixed cost, which is saved only if those get
tokens. With n requests, a share s of a step that grows with the rows, and k requests that will run longest, a token's
weight is s + (1 - s) n / k for those and s for the others; 1 for all where a request waits for a place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.core.draft import Draft
from foretoken.core.stop_rule import StopRule
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.confidence import Confidence
from foretoken.engine.draft_length.draft_ledger import Candidate, DraftLedger
from foretoken.engine.draft_length.length_rule import LengthRule, Prices
from foretoken.engine.draft_length.moving_averages import KEPT, LATE, Line, Mean
from foretoken.engine.draft_length.step_costs import Reading, StepCosts

_SHARE = 1.0 / 128  # of all time that trials may cost, and a quarter as much of a request's own time
_OWN_SHARE = _SHARE / 4.0
_MOST_SAVED = 8.0  # tokens for trials at most: savings of long ago do not pay for long losses
_MOST_FORESEEN = 256.0  # tokens of a new request, of which it may spend its share beforehand
_EVIDENCE = 16.0  # drafts, or half as many tokens lost, before the gain is believed: a few drafts are luck
_FIRST = 2.0  # drafts, after which a drafter that has gained is tried on the next request, too
_ADVANCE = 16.0  # tokens that few requests may owe in all while they find out
_LITTLE = 8  # unread tokens of a request with which a step still shows the gain of a draft
_HOPED = 0.5  # gain of a draft before any was measured
_FEW = 3  # requests: where no more run together, what drafting may gain is worth reading on credit
_MOST_KEPT, _MOST_LOST = 1.0, 0.25  # tokens that a draft gains or loses by a former run
_LONGEST_PASS = 4  # steps without a look-up of a request for which nothing was foretold lately, where more run together
_KEEPS = 0.98
_NEWEST = 32  # steps without a draft; their times are taken in once a draft is weighed against them
_PLAIN_TURN = 64  # so many steps with drafts, and one is plain: the cost of plain steps changes, too
_LONGEST_REST = 31  # steps without a call of the drafter and without measurement
_PROBE_EVERY = 32  # after so many empty drafts in a row, draft once anyway: the text may have become predictable
_PROBE_NODES = 2
_TIED = 2.0  # tokens: requests run equally long that will end so closely together
_LEAST_SHARE = 1.0 / 64  # of a step, that a request's own row takes
_LEAST_TIME = 0.1  # of a step with a draft, in tokens of plain decoding


class Controller:
    """Measures, and answers the two questions of a step: which requests get drafts, and how long these are.

    Args:
        reading: what the drafter's reading of a token costs, in tokens of plain decoding, by arithmetic.
        copying: whether its drafts cost nothing but a look-up before their first node: then a trial costs that, since
            further nodes are drafted where they are expected to pay.
        foretell: the confidence in the first node for a request; None: it is not known before the drafter is called.
        steps: costs of steps, by the magnitude of the number of requests; of another source's controller, to share.
    """

    def __init__(
        self,
        reading: float = 0.0,
        *,
        copying: bool = False,
        foretell: Callable[[Any], float] | None = None,
        steps: dict[int, StepCosts] | None = None,
    ) -> None:
        self.confidence = Confidence()
        self._foretell = foretell
        self._also: Mapping[int, Any] = {}  # by id: drafted for in any case, where it foretells
        self.resting = False  # whether no request is drafted for in this step, so that nothing need be measured
        self._reading, self._copying = Reading(reading), copying
        self._steps = {} if steps is None else steps
        self._regimes: dict[int, _Regime] = {}  # by the magnitude of the number of requests
        self._answer = Mean(_KEEPS)  # tokens of an answer
        self._plain: deque[tuple[StepCosts, int, float]] = deque(maxlen=_NEWEST)  # rows and seconds of such steps
        self._hurdles: dict[int, tuple[float, float, float, float]] = {}  # by the number of requests, see _promising
        self._asked: list[Candidate] = []
        self._before: list[tuple[int, int, int]] = []  # of each of them: tokens read, last call, unread
        self._backlog = self._newest = self._step = self._rest = self._rest_of = 0
        self._empty_steps = self._num_probes = self._total_asked = 0
        self._probing = False

    def ledger(self, request: Candidate) -> DraftLedger:
        """What this source's drafts brought the request."""
        return request.ledger

    def rests(self, num_requests: int, newest: int = 0) -> bool:
        """Called once before a step: whether no request gets a draft.

        Args:
            num_requests: that decode in this step.
            newest: the greatest id among them: a new request ends the rest.
        """
        alike = num_requests.bit_length() == self._rest_of and newest <= self._newest
        self.resting = self._rest > 0 and alike
        self._rest = self._rest - 1 if self.resting else 0
        if self.resting:
            self._asked = []
            self._regime(num_requests).save(_SHARE * num_requests)
        return self.resting

    def learned(self) -> dict[str, Any]:
        """What another run may begin with: shares and ratios, no seconds."""
        regimes = {
            str(magnitude): [each.costs.row, each.gain.value, each.gain.weight, each.rate]
            for magnitude, each in self._regimes.items()
            if each.costs.row_told
        }
        return {"stands": self.confidence.by_tenth(), "answer": self._answer.value, "regimes": regimes}

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Begin with what :meth:`learned` gave in a former run; all of it weighs as much as a few observations.

        Raises:
            ValueError, TypeError, KeyError: it is no such thing.
        """
        self.confidence.recall([_number(each, 0.0, 1.0) for each in learned["stands"]])
        if learned["answer"]:
            self._answer.recall(_number(learned["answer"], 1.0, 1e9))
        for magnitude, (row, gain, weight, rate) in learned["regimes"].items():
            regime = self._regime(1 << int(magnitude) >> 1)
            regime.costs.recall(_number(row, -1.0, 2.0))
            if weight:  # a loss is believed after a few more drafts, a gain as ever
                gain = min(_MOST_KEPT, max(-_MOST_LOST, _number(gain, -1e3, 1e3)))
                regime.gain.recall(gain, min(_number(weight, 0.0, 1e3), KEPT if gain > 0.0 else _EVIDENCE - KEPT))
                regime.rated.recall(_number(rate, 1.0, 1e3))

    @property
    def why_undrafted(self) -> str:
        """Why nothing has been drafted, in words; call it only if so."""
        if any(regime.believed and regime.gain.value <= 0.0 for regime in self._regimes.values()):
            return "drafts were tried, and plain decoding was faster"
        if self._total_asked:
            return "the drafter was called and proposed nothing"
        if not any(regime.costs.known for regime in self._regimes.values()):
            return "the answers ended before a plain step had been timed, which comes first"
        return "to find out whether drafts pay would have cost more than answers of this length can gain"

    def hopeless(self, request: Candidate, num_requests: int) -> bool:
        """Whether nothing will be drafted for a request that begins now, among so many."""
        regime = self._regime(num_requests)
        if not regime.believed or regime.gain.value > 0.0:
            return False
        to_come = self._to_come(request)
        most = regime.savings + _SHARE * to_come * (1 + num_requests)
        return self._reading_cost(request, num_requests) - regime.gain.value > most

    def choose(
        self, requests: Sequence[Candidate], num_requests: int, *, queued: bool = False
    ) -> list[StopRule | None]:
        """Called once before drafting, unless it rests: the rules that requests draft by; None: nothing is drafted.

        Args:
            num_requests: that decode in this step, the others included.
            queued: whether others wait for their places.
        """
        regime = self._regime(num_requests)
        costs = regime.costs
        self._step += 1
        self._asked, self._before, self._backlog, self._probing = [], [], 0, False
        self._newest = max((each.request_id for each in requests), default=self._newest)
        if not costs.known:
            self._take_in_plain_steps()
        if not requests or not costs.known or regime.since_plain >= _PLAIN_TURN:
            return [None] * len(requests)
        if self._foretell is None:
            self._weigh(requests, num_requests, costs, queued)
            self._asked = self._chosen(requests, num_requests, regime)
        else:
            self._asked = self._promising(requests, num_requests, regime, queued, self._foretell)
        if not self._asked:
            return [None] * len(requests)
        self._take_in_plain_steps()
        for request in self._asked:
            self._note(request)
        self._probing = not costs.row_known
        if self._empty_steps >= _PROBE_EVERY:
            probe = regime.drafting.at(_PROBE_NODES) + _PROBE_NODES * costs.row
            self._probing |= regime.savings >= probe / costs.token(num_requests)
        probed = self._asked[self._num_probes % len(self._asked)] if self._probing else None  # each time another
        self._num_probes += self._probing
        token = costs.token(num_requests)
        asking = regime.drafting.intercept / len(self._asked) / token
        prices = Prices(asking, regime.drafting.slope / token, max(0.0, costs.row) / token, regime.rate)
        chosen = {id(request) for request in self._asked}
        return [
            LengthRule(self.confidence, self.ledger(each), prices, _PROBE_NODES if each is probed else 0)
            if id(each) in chosen
            else None
            for each in requests
        ]

    def measure(self, *, num_requests: int, nodes: int, draft: float, total: float, prompts: bool = False) -> None:
        """Take in one step; the ledgers of its requests have its drafts.

        Args:
            num_requests: that decoded.
            nodes: draft nodes that were verified.
            draft, total: seconds of drafting, and of the whole step.
            prompts: whether it read prompts, too: then the step's time says nothing about decoding.
        """
        regime = self._regime(num_requests)
        if self._foretell is not None and not self.drafts:  # nearly every step, where nothing repeats
            regime.since_plain = 0
            regime.save(_SHARE * num_requests)
            if not prompts:
                self._plain.append((regime.costs, num_requests + nodes, total - draft))
            return
        cost = self._time_drafting(num_requests, nodes, draft) if self._asked else 0.0
        if not prompts:
            regime.costs.measure(num_requests + nodes, total - draft)
        self._book(num_requests, nodes, cost)

    @property
    def drafts(self) -> bool:
        """Whether any request gets a draft in this step."""
        return bool(self._asked)

    def rate(self, request: Candidate, num_requests: int) -> float:
        """Expected tokens of a step that drafts for a request, per token of plain decoding in its time.

        What the drafter has not read is spread over the steps to come. Call it before :meth:`choose`.
        """
        regime = self._regime(num_requests)
        tokens = regime.rate
        time = max(_LEAST_TIME, tokens - regime.gain.value)
        gain = self.ledger(request).gain(regime.gain.value) if regime.believed else _HOPED
        reading = self._reading_cost(request, num_requests) * tokens / max(1.0, self._to_come(request))
        return (time + gain) / (time + reading)

    def second(self, request: Candidate) -> tuple[StopRule, float] | None:
        """Of a second drafter, the rule and the rate for a request; None: it is not called."""
        return None

    def proposed(self, requests: Sequence[Candidate], drafts: Sequence[Draft]) -> None:
        """Take in the drafts of requests before they are verified."""
        return

    def count(self, request: Candidate, draft: Draft, accepted: int) -> None:
        """Take in a request's draft of this step, perhaps an empty one, and how many of its nodes were emitted."""
        self.ledger(request).count(len(draft), accepted)

    def compare(self, request: Candidate, draft: Draft, verdict: Verdict) -> None:
        """Learn how often the nodes of a request's draft were accepted."""
        self.learn(draft, verdict, self.ledger(request))

    def take_back(self, request: Candidate) -> None:
        """A request that was chosen gets its draft from elsewhere: the drafter was not called for it."""
        place = next((place for place, each in enumerate(self._asked) if each is request), None)
        if place is not None:
            del self._asked[place]
            ledger, (ledger.num_read, ledger.asked_at, unread) = self.ledger(request), self._before.pop(place)
            self._backlog -= unread
            self._total_asked -= 1

    def _take_in_plain_steps(self) -> None:
        while self._plain:
            costs, rows, seconds = self._plain.popleft()
            costs.measure(rows, seconds)

    def _time_drafting(self, num_requests: int, nodes: int, draft: float) -> float:
        """Take in how long drafting took; returns it in steps of the fewest rows."""
        regime = self._regime(num_requests)
        costs, drafting, backlog = regime.costs, regime.drafting, self._backlog
        if not costs.known:
            return 0.0
        plain = num_requests * costs.token(num_requests)
        base = costs.base
        expected = drafting.at(nodes) + backlog * self._reading.token(base * plain / num_requests) / base
        cost = min(draft / base, LATE * max(expected, plain)) if drafting.seen else draft / base
        if backlog > _LITTLE * len(self._asked):
            # where drafting was never timed, it is part of it; arithmetic may say far more
            read = cost - drafting.at(nodes)
            self._reading.measure(backlog, base * (read if drafting.seen else min(read, expected)))
        elif nodes:
            alone = max(0.0, cost + drafting.at(nodes) - expected)  # without the reading
            if self._probing:
                drafting.move(nodes, alone)
            if not self._probing or not drafting.seen:
                drafting.add(nodes, alone)
        return cost

    def _book(self, num_requests: int, nodes: int, cost: float) -> None:
        """Book the drafts of a step for their requests."""
        regime, asked = self._regime(num_requests), self._asked
        self._hurdles = {}
        if not asked:
            regime.since_plain = 0
            if regime.costs.known:
                regime.save(_SHARE * num_requests)
            return
        whole = all(own.gained >= own.nodes * own.weight for own in map(self.ledger, asked))
        if regime.costs.known:
            self._settle(regime, num_requests, cost)
        if not nodes:
            self._empty_steps += 1
        elif not (self._probing and whole):  # a probe that was accepted calls for another one
            self._empty_steps = 0
        regime.since_plain = regime.since_plain + 1 if nodes else 0

    def learn(self, draft: Draft, verdict: Verdict, ledger: DraftLedger) -> None:
        """Compare the drafter's confidences with acceptance: every child of an accepted node was tested."""
        if not draft.confidence:
            return
        accepted = {ROOT, *verdict.path}
        tested = [node for node, parent in enumerate(draft.tree.parents) if parent in accepted]
        expected = sum(1.0 - self.confidence.stands(draft.confidence[node]) for node in tested)
        ledger.learn(len(tested) - len(verdict.path), expected)
        self.confidence.learn(draft, verdict)

    def ended(self, num_tokens: int) -> None:
        """Take in the length of an answer."""
        self._answer.add(num_tokens)

    def _promising(
        self,
        requests: Sequence[Candidate],
        num_requests: int,
        regime: _Regime,
        queued: bool,
        foretell: Callable[[Any], float],
    ) -> list[Candidate]:
        """The requests for which the first node is expected to pay, whatever drafts of other confidence have gained."""
        also, step = self._also, self._step
        due = [each for each in requests if self.ledger(each).looks_at <= step or each.request_id in also]
        if not due:
            return []
        if not regime.costs.row_known:  # its cost follows from neighbouring steps, with drafts and without
            self._take_in_plain_steps()
            if regime.since_plain:
                return []
            return [each for each in due if each.request_id in also or foretell(each) > 0.0]
        if num_requests not in self._hurdles:
            token = regime.costs.token(num_requests)
            lost = max(0.0, -regime.gain.value) if regime.believed else 0.0
            asking = regime.drafting.intercept / token
            self._hurdles[num_requests] = regime.costs.row / token, asking, lost, max(self.confidence.by_tenth())
        row, asking, lost, surest = self._hurdles[num_requests]
        self._weigh(requests, num_requests, regime.costs, queued)
        found: list[tuple[float, Candidate]] = []
        for each in due:
            if each.request_id in also:
                found.append((math.inf, each))
                continue
            ledger = self.ledger(each)
            weight, misses = ledger.weight, ledger.misses
            if weight * (1.0 - (1.0 - surest) * misses) <= row:
                continue  # nothing that could be found pays
            confidence = foretell(each)
            gain = weight * (1.0 - (1.0 - self.confidence.stands(confidence)) * misses) - row
            if confidence > 0.0 and gain > 0.0:
                found.append((gain, each))
                ledger.passes = 0
            elif num_requests > _FEW:  # a look-up takes as long as a tenth of its token there
                ledger.passes = min(_LONGEST_PASS, ledger.passes + 1)
                ledger.looks_at = step + 1 + ledger.passes
        if not found:
            return []
        chosen = [each for gain, each in found if gain > asking / len(found) + lost]
        if lost and len(chosen) < len(found):
            regime.gain.add(0.0)  # the loss is forgotten while nothing is learned
            self._hurdles = {}
        return chosen

    def _chosen(self, requests: Sequence[Candidate], num_requests: int, regime: _Regime) -> list[Candidate]:
        """The requests that get drafts; sets the length of the rest if there are none."""
        # before anything is known, nothing may be owed for any number of requests, else each would owe for itself
        credit = min(regime.savings, sum(each.savings for each in self._regimes.values()))
        found, least, trying = [], float("inf"), False
        order = sorted(
            requests, key=lambda each: (self.ledger(each).asked_at < 0, self._reading_cost(each, num_requests))
        )
        for request in order:  # those that draft already come first
            ledger = self.ledger(request)
            if ledger.begun < 0:
                ledger.begun = len(request.tokens)
                ledger.foreseen = min(_MOST_FORESEEN, self._to_come(request))
            reading = self._reading_cost(request, num_requests)
            gain = ledger.gain(regime.gain.value) if regime.believed else _HOPED
            if self._copying and regime.costs.known:
                gain = max(gain, -regime.drafting.intercept / regime.costs.token(num_requests))
            pays = gain * self._to_come(request) > reading
            if ledger.recent.value > 0.0 and ledger.asked_at == self._step - 1:
                pays = True  # its last drafts paid, whatever others brought
            if not regime.believed:  # one after the other finds out, on credit where few run together
                begins = credit + _ADVANCE >= 0.0 if num_requests <= _FEW else 0.0 <= credit >= reading
                begins = begins or (self._copying and reading <= self._own_savings(request))  # whatever others owe
                begins = begins or (regime.gain.weight >= _FIRST and regime.gain.value > 0.0)  # it went well so far
                pays = pays and not trying and (begins or (ledger.trial and ledger.asked_at >= 0))
            ledger.trial = not pays or not regime.believed
            if not pays and regime.believed:
                loss = reading + max(0.0, -gain)
                own = self._own_savings(request)
                missing = loss - max(own, regime.savings)
                least = min(least, missing)
                pays = missing <= 0.0 and not (trying and own < loss)
            if pays:
                trying |= ledger.trial
                found.append(request)
        self._rest_of = num_requests.bit_length()
        if not found:
            self._rest = min(_LONGEST_REST, int(min(least, 1.0) / _SHARE / 4.0))
        return found

    def _settle(self, regime: _Regime, num_requests: int, draft: float) -> None:
        """Book what the drafts of a step gained: tokens that were accepted, less the time in tokens."""
        costs, token = regime.costs, regime.costs.token(num_requests)
        regime.save(_SHARE * num_requests)
        each_draft = draft / len(self._asked)
        for request in self._asked:
            ledger = self.ledger(request)
            gain = ledger.gained - (each_draft + ledger.nodes * costs.row) / token
            if ledger.trial:
                loss = max(gain, -each_draft / token) if self._copying else gain
                if regime.believed and self._own_savings(request) + loss >= 0.0:
                    ledger.balance = min(0.0, ledger.balance + loss)
                else:
                    regime.save(loss)
            if not ledger.nodes:
                ledger.learn(0.0, 0.0)
            little = self._backlog <= _LITTLE * len(self._asked)
            if little and not (self._probing and ledger.nodes):
                ledger.learn_gain(gain)
                regime.gain.add(gain)
            regime.rated.add(1.0 + ledger.gained)
            ledger.nodes, ledger.gained = 0, 0.0

    def _regime(self, num_requests: int) -> _Regime:
        magnitude = num_requests.bit_length()
        if magnitude not in self._regimes:
            costs = self._steps.setdefault(magnitude, StepCosts(1 << magnitude >> 1))
            self._regimes[magnitude] = _Regime(costs)
        return self._regimes[magnitude]

    def _to_come(self, request: Candidate) -> float:
        """Tokens that a request is expected to emit: as many as an answer has on average, however long it has been."""
        return min(request.tokens_left, self._answer.value) if self._answer.weight else request.tokens_left

    def _reading_cost(self, request: Candidate, num_requests: int) -> float:
        """The cost of what the drafter has not read, in tokens of plain decoding."""
        costs = self._regime(num_requests).costs
        if not costs.known:
            return 0.0
        plain = costs.base * costs.token(num_requests)
        return self._reading.token(plain) / plain * (len(request.tokens) - self.ledger(request).num_read)

    def _weigh(self, requests: Sequence[Candidate], num_requests: int, costs: StepCosts, queued: bool) -> None:
        """What a token is worth to each request; the same to all until it is known what a row takes."""
        share = 1.0
        if num_requests > 1 and costs.row_known and not queued:
            share = min(1.0, max(_LEAST_SHARE, costs.row / costs.token(num_requests)))
        if share == 1.0:
            for request in requests:
                self.ledger(request).weight = 1.0
            return
        usual = self._answer.value if self._answer.weight else float("inf")
        to_come = [min(each.tokens_left, usual) for each in requests]
        longest = max(to_come) - _TIED
        lasting = (1.0 - share) * num_requests / sum(each >= longest for each in to_come)
        for request, steps in zip(requests, to_come, strict=True):
            self.ledger(request).weight = share + (lasting if steps >= longest else 0.0)

    def _note(self, request: Candidate) -> None:
        """Note that the request drafts: the drafter will have read all of it."""
        ledger = self.ledger(request)
        self._total_asked += 1
        unread = len(request.tokens) - ledger.num_read if ledger.asked_at != self._step - 1 else 0
        self._before.append((ledger.num_read, ledger.asked_at, unread))
        self._backlog += unread
        ledger.num_read = len(request.tokens)
        ledger.asked_at = self._step

    def _own_savings(self, request: Candidate) -> float:
        """Tokens that trials of a request may cost it: a share of those that it has emitted, or is expected to."""
        ledger = self.ledger(request)
        emitted = len(request.tokens) - ledger.begun
        return min(_MOST_SAVED, ledger.balance + _OWN_SHARE * max(ledger.foreseen, emitted))


def _number(value: Any, least: float, most: float) -> float:
    """A number of a record.

    Raises:
        ValueError, TypeError: it is none, or out of range.
    """
    found = float(value)
    if not least <= found <= most:
        raise ValueError(f"{found} is not from {least} to {most}")
    return found


class _Regime:
    """Steps of a like number of requests: their costs, what drafting gained, and what trials may cost.

    Args:
        costs: of its steps.

    Attributes:
        drafting: its time by nodes, over all requests, in steps of the fewest rows.
        gain: tokens that the draft of a request gains.
        savings: tokens that trials may cost.
        rated: tokens of a request in a step that drafts.
        since_plain: steps since one had no draft.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.drafting = Line(_KEEPS, believed=1.0)
        self.gain, self.rated = Mean(_KEEPS), Mean(_KEEPS)
        self.savings = 0.0
        self.since_plain = 0

    @property
    def believed(self) -> bool:
        """Whether the gain is more than luck."""
        return self.gain.weight >= _EVIDENCE or self.gain.weight * self.gain.value < -_EVIDENCE / 2.0

    @property
    def rate(self) -> float:
        """Tokens of a step of one request, in the mean."""
        return max(1.0, self.rated.value)

    def save(self, tokens: float) -> None:
        """Add to what trials may cost."""
        self.savings = min(_MOST_SAVED, self.savings + tokens)
