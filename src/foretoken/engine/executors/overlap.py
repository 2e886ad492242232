"""Drafting ahead: whom a drafter is asked about, and how long it goes on."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.core.draft import Draft
from foretoken.core.laws import LawMaker
from foretoken.core.randomness import Streams
from foretoken.core.stop_rule import StopRule
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.request import Request
from foretoken.options.sampling import SamplingParams

Ahead = Draft | Exception
"""What was proposed ahead for a request, or why there is nothing."""


class Shadow:
    """A request as it will be if its pending draft stands: the ``Context`` that a drafter sees (core/protocols.py).

    Tokens and history are copies: the request goes on while a drafter looks at them. The random streams are its own;
    a drafter draws from the one of purpose "draft" alone, and nobody else does.

    Args:
        request: as it stands, at rest.
        pending: a chain; an empty one where nothing is known behind the root.
    """

    def __init__(self, request: Request, pending: Draft) -> None:
        self.request = request
        self.pending = pending
        self.tokens = [*request.tokens, *pending.tree.tokens]
        self.laws: LawMaker = request.laws
        if len(pending):
            self.laws = request.laws.copy()
            self.laws.append(pending.tree.tokens)

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def own_past(self) -> bool:
        return self.request.own_past

    @property
    def num_prompt(self) -> int:
        return self.request.num_prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def streams(self) -> Streams:
        return self.request.streams

    @property
    def slot(self) -> int:
        return self.request.slot

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.request.stop_ids

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.request.max_total - len(self.tokens)


class AheadRule(StopRule):
    """The stop rule of what is drafted while the target computes (:class:`foretoken.core.stop_rule.StopRule`).

    Drafting is hidden behind the target's forward, so a node costs its row of the next verification and no more. The
    first node is the guess, which costs nothing.

    Args:
        past: of the request; it weighs a node against that cost.
        stopped: whether the target is done; for a seeded request whose text depends on it, never.
    """

    def __init__(self, past: OwnPastRule, stopped: Callable[[], bool]) -> None:
        self.past = past
        self.stopped = stopped

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """True for the first node; then while the target computes, if the node is likely enough to stand."""
        pays = self.past.worthwhile(reach, confidence, num_nodes)
        return not num_nodes or (pays and not self.stopped())
