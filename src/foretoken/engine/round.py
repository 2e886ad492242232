"""One step's work while it goes through the engine's verbs."""

from dataclasses import dataclass, field

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.protocols import Features
from foretoken.core.verdict import Verdict
from foretoken.engine.request import Request
from foretoken.forward.batch import PackedBatch
from foretoken.models.language_model import Output


@dataclass(slots=True)
class Job:
    """One request's part in a step: a root with its draft, or a chunk of its prompt.

    Attributes:
        num_rows: its rows in the batch: the root, the draft's, and those that its verifier probes after them.
        wanted: how many of them, the last ones, are decided; 0 for a chunk in the middle of a prompt.
        prompt: whether the rows are a chunk of its prompt.
        read: rows before the decided ones; their logits give the prompt's log-probabilities.
        laws, logits_MV: the target's distributions and logits at the decided rows without probes, after the forward.
        damaged: nodes of the draft, and probes after them, that have NaN or infinite logits.
        guess: the token that a drafter expects after the draft, as a draft of one node; None: it did not draft ahead.
        features: the target's states of a draft that the drafter has not made, which gets them after the verdict.
        verdict: None until its rule has decided; it stays so where the request has ended.
    """

    request: Request
    draft: Draft
    num_rows: int
    wanted: int
    prompt: bool = False
    read: int = 0
    laws: Laws | None = None
    logits_MV: Tensor | None = None
    damaged: frozenset[int] = frozenset()
    guess: Draft | None = None
    features: Features | None = None
    verdict: Verdict | None = None

    @property
    def stood(self) -> bool:
        """Whether every node of the draft, a chain, was accepted."""
        return self.verdict is not None and len(self.verdict.path) == len(self.draft)

    @property
    def guessed(self) -> bool:
        """Whether the guess was right, so that the draft after it continues the next root."""
        if self.guess is None or self.verdict is None or not self.stood:
            return False
        return self.guess.tree.tokens == (self.verdict.extra,)


@dataclass(slots=True)
class Round:
    """A step.

    Attributes:
        jobs: one for each segment of the batch.
        failed: requests that ended with an error before the forward.
        ahead: whether the drafter ran during the forward; then the step's time does not include drafting.
        touched: requests that got tokens or ended, once it is committed.
        num_nodes, num_accepted: draft nodes that were put to the test, and drafted tokens that were emitted.
    """

    batch: PackedBatch
    jobs: list[Job]
    failed: list[Request]
    output: Output | None = None
    ahead: bool = False
    touched: list[Request] = field(default_factory=list)
    num_nodes: int = 0
    num_accepted: int = 0

    @property
    def changed(self) -> list[Request]:
        """Requests that got tokens or ended."""
        return self.failed + self.touched

    @property
    def num_tokens(self) -> int:
        """Tokens that requests got which decoded, one each and those that were accepted."""
        return sum(not job.prompt and job.verdict is not None for job in self.jobs) + self.num_accepted
