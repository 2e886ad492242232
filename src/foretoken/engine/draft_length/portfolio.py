"""Which of two sources drafts: copying from the text, which comes first and costs little, or a drafter with a model.

Each has a controller of its own, since the gain of one says nothing about the other: after a copied stretch a common
rate would be so high that drafting stops in the free text after it. They share the cost of a row.

    copies   rate of its own step: the most of (1 + P_1 + ... + P_m) / (1 + look-up + m rows), known beforehand
    model    its tokens over its seconds: this request's, shrunk to those of all requests with as many neighbours,
             with the reading of its backlog spread over the steps to come

The drafter compares the two (drafters/copies_first.py). Copies that follow a model's tokens are booked for copying.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.core.draft import Draft
from foretoken.core.stop_rule import StopRule
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.draft_ledger import Candidate, DraftLedger


class _OfModel(Controller):
    """The controller of the model."""

    def ledger(self, request: Candidate) -> DraftLedger:
        return request.model_ledger


class Portfolio(Controller):
    """The controller of copying, and that of a model.

    Args:
        reading: what the model's reading of a token costs, in tokens of plain decoding, by arithmetic.
        copies: the source of copied nodes.
        foretell: the confidence in the first copied node for a request.
    """

    def __init__(self, reading: float, copies: str, foretell: Callable[[Any], float]) -> None:
        super().__init__(foretell=foretell)
        self.model = _OfModel(reading, steps=self._steps)
        self._copies = copies
        self._seconds: dict[int, tuple[Candidate, StopRule, float]] = {}  # by request: the model's rule and rate

    def learned(self) -> dict[str, Any]:
        return {**super().learned(), "model": self.model.learned()}

    def recall(self, learned: Mapping[str, Any]) -> None:
        super().recall(learned)
        self.model.recall(learned["model"])

    @property
    def why_undrafted(self) -> str:
        return f"copies: {super().why_undrafted}; the model: {self.model.why_undrafted}"

    def rests(self, num_requests: int, newest: int = 0) -> bool:
        self.model.rests(num_requests, newest)
        return False  # copies are looked up in every step

    def hopeless(self, request: Candidate, num_requests: int) -> bool:
        return self.model.hopeless(request, num_requests)

    def choose(
        self, requests: Sequence[Candidate], num_requests: int, *, queued: bool = False
    ) -> list[StopRule | None]:
        """The rules of copies; :meth:`second` has those of the model."""
        self._seconds = {}
        if not self.model.resting:
            self._take_in_plain_steps()  # the model's controller weighs drafts against them, too
            seen = [each for each in requests if each.shown and each.source != self._copies]
            rates = [self.model.rate(each, num_requests) for each in seen]
            for each, rule, rate in zip(seen, self.model.choose(seen, num_requests, queued=queued), rates, strict=True):
                if rule is not None:
                    self._seconds[each.request_id] = each, rule, rate
        self._also = self._seconds  # copies may follow the model's tokens
        return super().choose(requests, num_requests, queued=queued)

    @property
    def drafts(self) -> bool:
        return bool(self._asked or self._seconds)

    def second(self, request: Candidate) -> tuple[StopRule, float] | None:
        """The model's rule and rate for a request; None: it is not called."""
        found = self._seconds.get(request.request_id)
        return None if found is None else found[1:]

    def proposed(self, requests: Sequence[Candidate], drafts: Sequence[Draft]) -> None:
        """Take in which source has drafted: the other one's controller learns nothing from a step that it lost."""
        for request, draft in zip(requests, drafts, strict=True):
            called = request.request_id in self._seconds
            if draft.sources[:1] == (self._copies,):
                if called:
                    self.model.take_back(self._seconds.pop(request.request_id)[0])
            elif (called and draft.sources[-1:] != (self._copies,)) or request.source not in (None, self._copies):
                self.take_back(request)

    def count(self, request: Candidate, draft: Draft, accepted: int) -> None:
        own = sum(source != self._copies for source in draft.sources)
        request.model_ledger.count(own, min(own, accepted))
        request.ledger.count(len(draft) - own, max(0, accepted - own))

    def measure(self, *, num_requests: int, nodes: int, draft: float, total: float, prompts: bool = False) -> None:
        if not self.drafts:
            super().measure(num_requests=num_requests, nodes=nodes, draft=draft, total=total, prompts=prompts)
            if not self.model.resting:
                self.model._book(num_requests, 0, 0.0)
            return
        regime = self._regime(num_requests)
        copied = sum(each.ledger.nodes for each in self._asked)
        copying = draft
        if self._seconds:  # the model's calls take nearly all of the time; look-ups get their usual time
            copying = min(draft, regime.drafting.at(copied) * regime.costs.base) if regime.costs.known else 0.0
        cost = self._time_drafting(num_requests, copied, copying) if self._asked else 0.0
        own = 0.0
        if self._seconds:
            own = self.model._time_drafting(num_requests, nodes - copied, draft - copying)
        if not prompts:
            regime.costs.measure(num_requests + nodes, total - draft)
        self._book(num_requests, copied, cost)
        if not self.model.resting:
            self.model._book(num_requests, nodes - copied, own)

    def compare(self, request: Candidate, draft: Draft, verdict: Verdict) -> None:
        own = sum(source != self._copies for source in draft.sources)
        if own == len(draft):
            self.model.learn(draft, verdict, request.model_ledger)
            return
        accepted = len(verdict.path)
        if own:
            self.model.learn(draft.part(0, own), Verdict(verdict.path[:own], 0), request.model_ledger)
        if accepted >= own:
            self.learn(draft.part(own), Verdict(tuple(range(accepted - own)), 0), request.ledger)

    def ended(self, num_tokens: int) -> None:
        super().ended(num_tokens)
        self.model.ended(num_tokens)
