"""The protocol between engine and executor: the engine offers the verbs of a step, an executor calls them in order.

schedule ─ propose ─ pack ─ forward ─ verify ─ commit ─ account
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from foretoken.core.draft import Draft
from foretoken.engine.executors.overlap import AssumedContext, DraftOrError
from foretoken.engine.request import Request
from foretoken.engine.round import Round
from foretoken.engine.scheduler import Work


class Verbs(Protocol):
    """The verbs of one step; engine/step.py implements them."""

    def schedule(self) -> Work:
        """Choose the requests of this step, and finish deferred work of an earlier plan."""
        ...

    def propose(self, work: Work) -> list[Draft]:
        """Return a draft for each decoding request, in order, checked against its budget; possibly empty."""
        ...

    def node_budgets(self, work: Work) -> list[int]:
        """Return the largest number of rows after the root of each decoding request, in order."""
        ...

    def ahead(
        self, contexts: Sequence[AssumedContext], limits: Sequence[int], stopped: Callable[[], bool]
    ) -> list[DraftOrError]:
        """Draft after the pending drafts of requests; may run on another thread than the other verbs.

        Args:
            contexts: the requests, as if their pending drafts were accepted.
            limits: largest number of nodes of each draft.
            stopped: where the draft length is adaptive, drafts end when this returns True.
        """
        ...

    def expect(self, current: Round, contexts: Sequence[AssumedContext], ahead: Sequence[DraftOrError]) -> None:
        """Hand each block's first token to its job. Without a pending draft, a drafter's error ends the request."""
        ...

    def pack(self, work: Work, drafts: Sequence[Draft]) -> Round:
        """Reserve the rows of this step in the cache and put them into one batch."""
        ...

    def forward(self, current: Round) -> None:
        """Compute the batch by the recipe's plan, and pass requested features to the drafter."""
        ...

    def verify(self, current: Round) -> None:
        """Verify every draft by the recipe's rule; an error ends its own request only."""
        ...

    def commit(self, current: Round) -> list[Request]:
        """Keep accepted rows, append tokens, inform the drafter. Returns the requests that got tokens or ended."""
        ...

    def account(self, current: Round, *, draft: float, verify: float, total: float) -> None:
        """Record the durations of the step's parts, in seconds."""
        ...


class Executor(ABC):
    """Runs one step with the engine's verbs.

    In any order and on any thread, it must commit what the serial executor commits.
    """

    name: str

    def step(self, engine: Verbs) -> list[Request]:
        """Run one step. Returns the requests that got tokens or ended."""
        began = perf_counter()
        return self.run(engine, engine.schedule(), began).changed

    @abstractmethod
    def run(self, engine: Verbs, work: Work, began: float) -> Round:
        """Run a step of scheduled work.

        Args:
            began: when scheduling began.
        """

    def close(self) -> None:  # noqa: B027  (most have none)
        """End the executor's threads, if any; another step starts them again."""
