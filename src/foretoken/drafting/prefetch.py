"""Passes of chains that one native call computes before the drafts that need them are grown.

    one native call       pass 0, pass 1, pass 2 ...     each reads the best token, or one drawn, while that may pay
    growing               node 1 from pass 0, node 2 from pass 1 ...     the stop rule decides as without prefetching

A pass is used only if it read the very token that the draft has reached; a wrong prediction costs time only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.stop_rule import NO_LIMIT
from foretoken.core.tree import ROOT
from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.drafting.feature_heads.native.chains import Pass, Prefetch
from foretoken.models.language_model import Output


class DraftPass(NamedTuple):
    """One pass of a draft network.

    Attributes:
        output: of its wanted rows.
        drafts: the draft of each row, numbered in the order in which their first rows were read.
        tokens: the token that each row read; of a first pass none.
        following_MW: the features recycled from these rows; None: tokens enter by themselves.
    """

    output: Output
    drafts: Sequence[int] = ()
    tokens: Sequence[int] = ()
    following_MW: Tensor | None = None

    @classmethod
    def of(cls, found: Pass, columns: Columns | None) -> "DraftPass":
        """Return a native pass over these columns of the vocabulary."""
        return cls(Output.ranked(found.ranked, columns), found.drafts, found.tokens, found.following_MW)


def prefetch_plan(drafts: Sequence[DraftBuilder], scored: int) -> list[Prefetch]:
    """How many passes of each chain to compute at once; nothing if a row's token cannot be predicted.

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
        prefetch = Prefetch(most, outlook.stands, outlook.first, outlook.later, outlook.free)
        if not context.params.greedy:
            uniforms = context.streams.foreseen("draft", scored, most - 1)
            prefetch = prefetch._replace(temperature=context.params.temperature, uniforms=uniforms)
        found.append(prefetch)
    return found


class Prefetched:
    """The prefetched passes of some chains."""

    def __init__(self) -> None:
        self._passes: list[DraftPass] = []
        self._numbers: dict[int, int] = {}

    def keep(self, passes: list[DraftPass], drafts: Sequence[DraftBuilder]) -> None:
        """Keep these passes, and the drafts that they belong to, instead of those before."""
        self._passes = passes
        self._numbers = {draft.context.request_id: number for number, draft in enumerate(drafts)}

    def next(self, drafts: Sequence[DraftBuilder]) -> tuple[DraftPass, list[int]] | None:
        """The pass that read the last node of each of these drafts, and its row of each.

        Returns:
            None if there is none; then the later ones are dropped, too.
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
