"""A drafter that fails on demand. The others that tests need are public: see foretoken_lab.testing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foretoken.core.draft import Draft
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken_lab.testing import Stub


class Crashing(Stub):
    """Another drafter, except that it raises when ``culprit`` says so of a context."""

    def __init__(self, inner: Drafter, culprit: Callable[[Context], bool], *, when: str = "propose") -> None:
        self.branches, self.laws = inner.branches, inner.laws
        self._inner = inner
        self._culprit = culprit
        self._when = when
        self._marked: set[int] = set()

    def attach(self, cache: Any) -> None:
        self._inner.attach(cache)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = self._inner.propose(contexts, budgets)  # first: a failure finds the others' state changed
        for context in contexts:
            if self._culprit(context):
                self._marked.add(context.request_id)
                if self._when == "propose":
                    raise RuntimeError("the drafter crashed")
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe(outcomes)
        if self._when == "observe" and any(outcome.request_id in self._marked for outcome in outcomes):
            raise RuntimeError("the drafter crashed")

    def release(self, request_id: int) -> None:
        self._inner.release(request_id)
