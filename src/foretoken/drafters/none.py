"""Plain decoding: the empty draft. It must cost the same as not having speculation at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.draft import NO_DRAFT, Draft, PointMass
from foretoken.core.protocols import Budget, Context, Outcome


class NoDrafter:
    """Proposes nothing, remembers nothing."""

    name = "none"
    laws = (PointMass,)
    branches = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Plain decoding has no options."""

    def __init__(self, config: Config, target: Any = None) -> None:
        del config, target

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [NO_DRAFT] * len(contexts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def release(self, request_id: int) -> None:
        pass
