"""Passes of chains that were made in one go, ahead of the drafts that are grown from them.

    one native call       pass 0, pass 1, pass 2 ...     each token the best one, or drawn, for as long as that may pay
    growing               node 1 from pass 0, node 2 from pass 1 ...     the same questions to the same stop rule

A pass counts only where it has read the very token that the draft has come to: what was foreseen wrongly costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from foretoken.core.stop_rule import NO_LIMIT
from foretoken.core.tree import ROOT
from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.drafting.feature_heads.native.chains import Ahead
from foretoken.models.language_model import Output


class ReadPass(Protocol):
    """One pass."""

    @property
    def output(self) -> Output:
        """Of its wanted rows."""
        ...

    @property
    def drafts(self) -> Sequence[int]:
        """Of each row, which draft it belongs to, in the order in which their first rows were read."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """That were read; of a first pass none."""
        ...


Made = TypeVar("Made", bound=ReadPass)


def foreseen(drafts: Sequence[DraftBuilder], scored: int) -> list[Ahead]:
    """How far each of these chains may be read on; nothing where it cannot be said what a row's token will be.

    Args:
        scored: columns of a row.
    """
    found = []
    for draft in drafts:
        context, budget = draft.context, draft.budget
        outlook = NO_LIMIT if budget.stop_rule is None else budget.stop_rule.outlook()
        if draft.frontier != [ROOT] or not (context.laws.trivial or context.laws.tempered) or outlook is None:
            return []
        most = min(budget.max_nodes, budget.max_depth)
        ahead = Ahead(most, outlook.stands, outlook.first, outlook.later, outlook.free)
        if not context.params.greedy:
            uniforms = context.streams.foreseen("draft", scored, most - 1)
            ahead = ahead._replace(temperature=context.params.temperature, uniforms=uniforms)
        found.append(ahead)
    return found


class ReadAhead(Generic[Made]):
    """What was read ahead of some chains."""

    def __init__(self) -> None:
        self._passes: list[Made] = []
        self._numbers: dict[int, int] = {}

    def keep(self, passes: list[Made], drafts: Sequence[DraftBuilder]) -> None:
        """Take passes over, with the drafts that they were made for; those before are forgotten."""
        self._passes = passes
        self._numbers = {draft.context.request_id: number for number, draft in enumerate(drafts)}

    def next(self, drafts: Sequence[DraftBuilder]) -> tuple[Made, list[int]] | None:
        """The pass that has read the last node of each of these drafts, and its row of each.

        Returns:
            None if there is none; then those behind it are forgotten, too.
        """
        if not self._passes:
            return None
        found, *self._passes = self._passes
        row_of, rows = {number: row for row, number in enumerate(found.drafts)}, []
        for draft in drafts:
            row = row_of.get(self._numbers[draft.context.request_id])
            if row is None or found.tokens[row] != draft.tokens[draft.frontier[0]]:
                self._passes = []
                return None
            rows.append(row)
        return found, rows
