"""What drafting has brought one request so far."""

from dataclasses import dataclass, field
from typing import Protocol

from foretoken.engine.draft_length.moving_averages import Mean

_KEEPS = 0.95  # of what a request's drafts brought, per draft: its text changes
_RECENT = 0.7
_SHRINK = 20.0  # so many of a request's own nodes, or drafts, weigh as much as those of all requests


@dataclass(slots=True)
class DraftLedger:
    """How one request stands with the drafter.

    Attributes:
        num_read: tokens that the drafter had read at its last draft.
        asked_at: the step of the engine in which that was.
        begun: tokens that it had when it was first looked at; -1: it was not.
        foreseen: tokens that it was expected to emit then.
        balance: tokens that its own trials have cost, negative.
        recent: tokens that its last few drafts gained.
        trial: whether it drafts in this step to find out whether that pays.
        weight: what a drafted token that is accepted is worth, in tokens of plain decoding.
        looks_at, passes: the step of its next look-up, and how many steps before that are passed over.
        nodes, gained: of this step: draft nodes, and what the accepted ones are worth.
    """

    num_read: int = 0
    asked_at: int = -1
    begun: int = -1
    foreseen: float = 0.0
    balance: float = 0.0
    trial: bool = False
    weight: float = 1.0
    looks_at: int = 0
    passes: int = 0
    nodes: int = 0
    gained: float = 0.0
    recent: Mean = field(default_factory=lambda: Mean(_RECENT))
    _gain: Mean = field(default_factory=lambda: Mean(_KEEPS))
    _missed: float = 0.0
    _expected: float = 0.0

    def count(self, nodes: int, accepted: int) -> None:
        """Take in the draft of this step."""
        self.nodes, self.gained = nodes, self.weight * accepted

    def gain(self, of_all: float) -> float:
        """Tokens that a draft is expected to gain: this request's own ones, shrunk to those of all requests."""
        own = self._gain
        return (own.value * own.weight + of_all * _SHRINK) / (own.weight + _SHRINK)

    def learn_gain(self, gain: float) -> None:
        """Take in the gain of one draft."""
        self._gain.add(gain)
        self.recent.add(gain)

    @property
    def misses(self) -> float:
        """How often nodes fell for this request, as a multiple of how often such nodes fall."""
        return (self._missed + _SHRINK) / (self._expected + _SHRINK)

    def learn(self, missed: float, expected: float) -> None:
        """Take in nodes that were tested: how many fell, and how many were expected to."""
        self._missed = self._missed * _KEEPS + missed
        self._expected = self._expected * _KEEPS + expected


class Candidate(Protocol):
    """What must be known of a request (engine/request.py has it)."""

    @property
    def request_id(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def tokens_left(self) -> int: ...

    @property
    def ledger(self) -> DraftLedger: ...

    @property
    def model_ledger(self) -> DraftLedger: ...

    @property
    def shown(self) -> bool: ...

    @property
    def source(self) -> str | None: ...
