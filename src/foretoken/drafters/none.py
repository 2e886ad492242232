"""Plain decoding: the empty draft. It must cost the same as not having speculation at all."""

from collections.abc import Sequence
from typing import Any

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.protocols import Budget, Context, Drafter, NoOptions


class NoDrafter(Drafter):
    """Proposes nothing, remembers nothing."""

    name = "none"
    flops = 0.0  # there is no model of its own

    def __init__(self, config: NoOptions, target: Any = None) -> None:
        del config, target

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [NO_DRAFT] * len(contexts)
