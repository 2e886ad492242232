"""The executor's seam: who runs when and where. The engine gives the verbs, an executor gives their order.

schedule ─ propose ─ pack ─ forward ─ verify ─ commit ─ account
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from foretoken.core.draft import Draft
from foretoken.engine.executors.overlap import Ahead, Shadow
from foretoken.engine.request import Request
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work


class Verbs(Protocol):
    """What an engine can be asked to do; engine/step.py has them."""

    def schedule(self) -> Work:
        """Decide who runs in this step, and bring up to date what an earlier plan has left behind."""
        ...

    def propose(self, work: Work) -> list[Draft]:
        """One draft for each request that decodes, in order, checked against its budget; empty where there is none."""
        ...

    def room(self, work: Work) -> list[int]:
        """Rows behind the root that each request that decodes may have in this step, in order."""
        ...

    def ahead(self, shadows: Sequence[Shadow], rooms: Sequence[int], stopped: Callable[[], bool]) -> list[Ahead]:
        """What the drafter proposes behind the pending drafts of requests; may run on another thread than the rest.

        Args:
            shadows: whom it is asked about.
            rooms: nodes of each proposal, at most.
            stopped: where drafts are as long as pays, they end when this says so.
        """
        ...

    def expect(self, current: Round, shadows: Sequence[Shadow], ahead: Sequence[Ahead]) -> None:
        """Hand the guesses to their jobs. Where nothing was pending, a failure of the drafter ends its request."""
        ...

    def pack(self, work: Work, drafts: Sequence[Draft]) -> Round:
        """Reserve the rows of this step in the cache and put them into one batch."""
        ...

    def forward(self, current: Round) -> None:
        """Compute the batch by the recipe's plan, and show a drafter what it has asked for."""
        ...

    def verify(self, current: Round) -> None:
        """Let the recipe's rule decide every draft of the round; a fault ends its own request only."""
        ...

    def commit(self, current: Round) -> list[Request]:
        """Keep accepted rows, append the tokens, tell the drafter. Returns the requests that got tokens or ended."""
        ...

    def account(self, current: Round, *, draft: float, verify: float, total: float) -> None:
        """Take in how long the parts of the step took, in seconds."""
        ...


class Executor(Protocol):
    """Runs one step with the engine's verbs.

    Whatever the order and the place, what is committed must be what the serial executor commits.
    """

    name: str

    def step(self, engine: Verbs) -> list[Request]:
        """One round for everybody who runs. Returns the requests that got tokens or ended."""
        ...

    def close(self) -> None:
        """End the threads, if it has any; another step starts them again."""
        ...
