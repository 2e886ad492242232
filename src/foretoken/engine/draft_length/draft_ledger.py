"""The ledger of drafting: which requests get drafts, by the gain so far, and what trials may cost.

Everything is counted in tokens that plain decoding would have emitted in the same time. A step that drafts gains the
drafted tokens that stand, and loses the time of drafting and of the further rows. That was measured for steps of a like
number of requests (engine/draft_length/step_costs.py), so the cost for a request is known beforehand:

    pays    gain of a step * steps to come  >  cost of reading what the drafter has not read yet

A drafter reads nothing before that. Where drafting is known not to pay, or not known to pay, single requests try it for
some steps all the same, because the text may have changed. That costs, and the costs come out of a budget:

    budget   + a small share of all time, plus the gains of drafting       - its losses

A trial of known cost begins when the budget covers that cost; the first trial of its kind, as soon as the budget is not
negative. Where more than a few requests run together, the budget must also cover the drafter's reading for that first
trial: they gain little, and a batch is soon over. So in the long run the loss stays within that share, however
expensive the drafter and however long the prompts. Steps with a similar number of requests have their own budget; else
the gains of steps with few requests would be spent on trials in steps with many.

A token is not worth the same for every request. A step has a fixed cost, however few requests run, plus the cost of one
row for each. Where no request waits for a slot, a token saves its request's row in one later step; the fixed cost of a
step is saved only if the requests that will run longest get tokens. So tokens are weighted: with n requests, a share
s of a step that grows with the rows, and k requests that will run longest,

    weight  s + (1 - s) * n / k for those k, s for the others; 1 for all where a request waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foretoken.engine.draft_length.moving_averages import Mean
from foretoken.engine.draft_length.step_costs import Reading, StepCosts

_SHARE = 1.0 / 128  # of all time goes into trials, at most
_MOST_SAVED = 256.0  # tokens in the budget at most: gains of long ago do not pay for hours of losses
_TRIAL = 16  # steps of one request
MIN_EVIDENCE = 16.0  # of them, or so many tokens lost, before the gain is believed: a few drafts are luck
_FEW = 3  # requests: where no more run together, what drafting may gain is worth reading on credit
_HOPED = 0.5  # gain of a step before any was measured
_PLAIN_TURN = 64  # where drafting pays, every so many steps are plain: the cost of plain steps changes, too
_KEEPS = 0.98
_RESTED = 1.0 / 4  # of the steps until a trial can be paid for, at a time: nothing is drafted or measured in them
_LONGEST_REST = 31
_TIED = 2.0  # tokens: requests run equally long that will end so closely together
_LEAST_SHARE = 1.0 / 64  # of a step, that a request's own row takes


@dataclass(slots=True)
class DraftLedger:
    """How one request stands with the drafter.

    Attributes:
        num_read: tokens that the drafter had read at its last draft.
        asked_at: the step of the engine in which that was.
        trial: further steps in which it drafts as a trial.
        weight: what a drafted token that stands is worth, in tokens of plain decoding.
    """

    num_read: int = 0
    asked_at: int = -1
    trial: int = 0
    weight: float = 1.0


class Candidate(Protocol):
    """What must be known of a request (engine/request.py has it)."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def tokens_left(self) -> int: ...

    @property
    def ledger(self) -> DraftLedger: ...


class Worth:
    """Decides before every step which requests get drafts.

    Args:
        reading: what a drafter's reading costs.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._purses: dict[int, float] = {}  # by the magnitude of the number of requests
        self._gains: dict[int, Mean] = {}  # of a step of a request, by the magnitude of the number of requests
        self._answer = Mean(_KEEPS)  # tokens of an answer
        self._step = self._num_requests = 0
        self.num_asked = 0
        self.total_asked = 0  # over all steps
        self.rest = 0  # further steps without drafts, if about as many requests decode
        self.backlog = 0  # tokens that the drafter reads in this step, because it did not draft in the one before

    def choose(
        self, requests: Sequence[Candidate], num_requests: int, costs: StepCosts, *, queued: bool = False
    ) -> list[bool]:
        """Whether each of the requests is drafted for in this step; sets what a token is worth to each.

        Args:
            num_requests: that decode in this step, the others included.
            costs: of steps of so many requests.
            queued: whether others wait for their places.
        """
        self._step += 1
        self._num_requests = num_requests
        self.num_asked = self.backlog = self.rest = 0
        gain = self._gain(num_requests)
        known = _known(gain)
        pays = known and gain.value > 0.0
        if not costs.known or (pays and self._step % _PLAIN_TURN == 0):
            return [False] * len(requests)
        budget = self._budget(num_requests) if known else self._credit(num_requests)
        missing = (_TRIAL * -gain.value if known else 0.0) - budget  # for a trial
        if not pays and missing > 0.0 and not any(each.ledger.trial for each in requests):
            self.rest = min(_LONGEST_REST, int(_RESTED * missing / (_SHARE * num_requests)))
            return [False] * len(requests)
        if not requests:  # every decoding request has drafting switched off
            return []
        plain = costs.token(num_requests)
        per_token = self._reading.token(plain) / plain
        costs_of = [per_token * (len(each.tokens) - each.ledger.num_read) for each in requests]
        if not pays:
            self._begin_trials(requests, costs_of, budget, gain.value if known else None, few=num_requests <= _FEW)
        self._weigh(requests, num_requests, costs, queued)
        asked = []
        for request, cost in zip(requests, costs_of, strict=True):
            asks = request.ledger.trial > 0 or (pays and gain.value * self._to_come(request) > cost)
            asked.append(asks)
            if asks:
                self._note(request)
        if not pays and not self.num_asked:  # all have so much to be read first that they are not tried
            self.rest = _LONGEST_REST
        return asked

    @property
    def found_slower(self) -> bool:
        """Whether drafting was measured, for some number of requests, and lost against plain decoding."""
        return any(_known(gain) and gain.value <= 0.0 for gain in self._gains.values())

    def hopeless(self, request: Candidate, num_requests: int) -> bool:
        """Whether a request that begins now will be over before another trial can be paid for."""
        gain = self._gain(num_requests)
        if not _known(gain) or gain.value > 0.0:
            return False
        return _TRIAL * -gain.value - self._budget(num_requests) > _SHARE * num_requests * self._to_come(request)

    def affords(self, tokens: float) -> bool:
        """Whether so much may be lost in this step on something that is not expected to pay."""
        return self._budget(self._num_requests) >= tokens

    def measure(
        self,
        num_requests: int,
        costs: StepCosts,
        *,
        nodes: int,
        accepted: float,
        draft: float,
        total: float,
        typical: bool,
    ) -> None:
        """Account for one step.

        Args:
            nodes: drafted tokens.
            accepted: what those that stood were worth.
            draft, total: seconds of drafting, and of the step.
            typical: whether its drafts were as later ones will be; a probe's are not.
        """
        if not costs.known:
            return
        plain = costs.token(num_requests)
        gained = 0.0
        if self.num_asked:
            gained = accepted - (draft + nodes * costs.row(num_requests)) / plain
        self._save(num_requests, _SHARE * total / plain + gained)
        if self.num_asked and not self.backlog and typical:
            self._gain(num_requests).add(gained / self.num_asked, self.num_asked)

    def rested(self, num_tokens: int, num_requests: int) -> None:
        """Account for plain decoding that was not measured: so many tokens, of about so many requests a step."""
        self._save(num_requests, _SHARE * num_tokens)

    def ended(self, num_tokens: int) -> None:
        """Take in the length of an answer."""
        self._answer.add(num_tokens)

    def _gain(self, num_requests: int) -> Mean:
        return self._gains.setdefault(num_requests.bit_length(), Mean(_KEEPS))

    def _budget(self, num_requests: int) -> float:
        return self._purses.get(num_requests.bit_length(), 0.0)

    def _credit(self, num_requests: int) -> float:
        """Before anything is known: nothing may be owed for any number of requests, else each would owe for itself."""
        return min(self._budget(num_requests), sum(self._purses.values()))

    def _save(self, num_requests: int, tokens: float) -> None:
        self._purses[num_requests.bit_length()] = min(_MOST_SAVED, self._budget(num_requests) + tokens)

    def _to_come(self, request: Candidate) -> float:
        """Steps that a request is expected to run for: as long as an answer is on average, however long it has been."""
        return min(request.tokens_left, self._answer.value) if self._answer.weight else request.tokens_left

    def _weigh(self, requests: Sequence[Candidate], num_requests: int, costs: StepCosts, queued: bool) -> None:
        """What a token is worth to each request; the same to all until it is known what a row takes."""
        share = 1.0
        if costs.row_known and not queued:
            share = min(1.0, max(_LEAST_SHARE, costs.row(num_requests) / costs.token(num_requests)))
        to_come = [self._to_come(each) for each in requests]
        longest = max(to_come) - _TIED
        lasting = (1.0 - share) * num_requests / sum(each >= longest for each in to_come)
        for request, steps in zip(requests, to_come, strict=True):
            request.ledger.weight = share + (lasting if steps >= longest else 0.0)

    def _begin_trials(
        self, requests: Sequence[Candidate], costs_of: Sequence[float], budget: float, gain: float | None, *, few: bool
    ) -> None:
        """Let requests try that cost little, as far as the budget goes.

        The first one of its kind goes on credit, its first reading only where few run together.
        """
        known = gain is not None
        if known and budget < 0.0:
            for request in requests:
                request.ledger.trial = 0
        if budget < 0.0 or (not known and any(each.ledger.trial for each in requests)):
            return
        a_trial = _TRIAL * max(0.0, -gain) if gain is not None else 0.0
        left = budget - sum(a_trial / _TRIAL * each.ledger.trial for each in requests)
        if known and left < a_trial:
            return
        for place in sorted(range(len(requests)), key=costs_of.__getitem__):
            request, cost = requests[place], costs_of[place]
            if request.ledger.trial or cost > _HOPED * self._to_come(request):
                continue
            if not (known or few) and cost > budget:
                return
            left -= cost + a_trial
            if known and left < 0.0:
                return
            request.ledger.trial = _TRIAL
            if not known:
                return

    def _note(self, request: Candidate) -> None:
        """Note that the request drafts: the drafter will have read all of it."""
        ledger = request.ledger
        self.num_asked += 1
        self.total_asked += 1
        if ledger.asked_at != self._step - 1:
            self.backlog += len(request.tokens) - ledger.num_read
        ledger.num_read = len(request.tokens)
        ledger.asked_at = self._step
        ledger.trial = max(0, ledger.trial - 1)


def _known(gain: Mean) -> bool:
    return gain.weight >= MIN_EVIDENCE or gain.weight * gain.value < -MIN_EVIDENCE
