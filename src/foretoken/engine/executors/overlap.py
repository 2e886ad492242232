"""Drafting while the target computes: the context that a drafter sees meanwhile, and when it stops."""

from collections.abc import Callable

from foretoken.core.draft import Draft
from foretoken.core.laws import LawMaker
from foretoken.core.stop_rule import StopRule
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.request import Request

DraftOrError = Draft | Exception
"""The draft that follows a pending draft, or the error that the drafter raised for this request."""


class AssumedContext:
    """A request as it will be if its pending draft is accepted: the ``Context`` of a drafter (core/protocols.py).

    Tokens and history are copies, because the request may change while the drafter reads them. The random streams are
    the request's; the drafter draws from the one of purpose "draft" alone, and only the drafter does.

    Args:
        request: between two steps.
        pending: a chain, which the target is reading; empty in a pre-verify step.
    """

    def __init__(self, request: Request, pending: Draft) -> None:
        self.request, self.pending = request, pending
        self.request_id, self.slot, self.num_prompt = request.request_id, request.slot, request.num_prompt
        self.params, self.streams, self.stop_ids = request.params, request.streams, request.stop_ids
        self.history_only, self.adapter = request.history_only, request.adapter
        self.tokens = [*request.tokens, *pending.tree.tokens]
        self.laws: LawMaker = request.laws
        if len(pending):
            self.laws = request.laws.copy()
            self.laws.append(pending.tree.tokens)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still follow."""
        return self.request.max_total - len(self.tokens)


class OverlapRule(StopRule):
    """The stop rule of drafts that are written while the target computes (:class:`foretoken.core.stop_rule.StopRule`).

    Drafting is hidden by the target's forward, so a node costs no more than its row of the next verification. The first
    node, which the target tests in any case, costs nothing.

    Args:
        past: of the request; it compares a node's probability with that cost.
        stopped: whether the target has finished; always False for a seeded request if its text depends on drafts.
    """

    def __init__(self, past: OwnPastRule, stopped: Callable[[], bool]) -> None:
        self.past = past
        self.stopped = stopped

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """Accept the first node; then, while the target computes, every node that is probable enough."""
        pays = self.past.worthwhile(reach, confidence, num_nodes)
        return not num_nodes or (pays and not self.stopped())
