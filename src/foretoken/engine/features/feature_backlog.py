"""The target's hidden states of steps without drafts: kept as computed, and given to the drafter before its next call.

Where drafting does not pay, nearly every step is one row for each request. Splitting such forwards by request and
handing them to the drafter one by one costs 5 to 10 % of a small model's step; keeping a step's tensors costs almost
nothing. The states of a request that ends before the drafter's next call are never read.

A request that begins where another trial is out of reach (engine/draft_length/draft_ledger.py) is not shown at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT
from foretoken.core.protocols import Drafter, Features
from foretoken.engine.faults import Faults
from foretoken.engine.request import Request

_MOST = 128  # steps; then the drafter gets them in any case, since it may store them more compactly


@dataclass(slots=True)
class _Step:
    """One row for each request: its position, the most probable token after it, and depth -> [rows, D]."""

    requests: Sequence[Request]
    positions: Sequence[int]
    best: Sequence[int]
    hidden: Mapping[int, Tensor]


class FeatureBacklog:
    """Steps that one engine's drafter has not seen yet.

    Args:
        drafter: gets them in their order.
        faults: ends requests that the drafter fails on.
    """

    def __init__(self, drafter: Drafter, faults: Faults) -> None:
        self._drafter = drafter
        self._faults = faults
        self._steps: list[_Step] = []

    def keep(
        self, requests: Sequence[Request], positions: Sequence[int], best: Sequence[int], hidden: Mapping[int, Tensor]
    ) -> None:
        """Keep a step in which every request had one row, all of them wanted and tapped."""
        self._steps.append(_Step(requests, positions, best, hidden))
        if len(self._steps) >= _MOST:
            self.show()

    def show(self) -> None:
        """Give the drafter the kept rows of requests that still run and are shown, the rows of each together."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        rows: dict[int, list[int]] = {}  # of each request among those of all steps
        begun: dict[int, tuple[Request, int]] = {}
        best = [token for step in steps for token in step.best]
        row = 0
        for step in steps:
            for request, position in zip(step.requests, step.positions, strict=True):
                if request.shown and not request.finished:
                    rows.setdefault(request.request_id, []).append(row)
                    begun.setdefault(request.request_id, (request, position))
                row += 1
        if not begun:
            return
        # a drafter may change its needs: it gets the depths that were tapped in all of these steps
        depths = [depth for depth in steps[0].hidden if all(depth in step.hidden for step in steps)]
        hidden = {depth: torch.cat([step.hidden[depth] for step in steps]) for depth in depths}
        features = [
            Features(
                request,
                position,
                NO_DRAFT,
                {depth: values[rows[number]] for depth, values in hidden.items()},
                [best[each] for each in rows[number]],
            )
            for number, (request, position) in begun.items()
        ]
        self._faults.tell([request for request, _ in begun.values()], features, self._drafter.on_forward)
