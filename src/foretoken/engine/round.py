"""One step's work while it goes through the engine's verbs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.verdict import Verdict
from foretoken.engine.request import Request
from foretoken.models.batch import PackedBatch
from foretoken.models.language_model import Output


@dataclass(slots=True)
class Job:
    """One request's part in a step: a root with its draft, or a chunk of its prompt.

    Attributes:
        num_rows: its rows in the batch: the root, the draft's, and those that its verifier probes behind them.
        wanted: how many of them, the last ones, are decided; 0 for a chunk in the middle of a prompt.
        prompt: whether the rows are a chunk of its prompt.
        read: rows in front of the decided ones whose logits say how probable the prompt was.
        laws, logits_MV: the target's at the decided rows without probes, once the forward is done.
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
    verdict: Verdict | None = None


@dataclass(slots=True)
class Round:
    """A step.

    Attributes:
        jobs: one for each segment of the batch.
        failed: requests that ended with an error before the forward.
        num_nodes, num_accepted: draft nodes that were put to the test, and drafted tokens that were emitted.
    """

    batch: PackedBatch
    jobs: list[Job]
    failed: list[Request]
    output: Output | None = None
    num_nodes: int = 0
    num_accepted: int = 0
