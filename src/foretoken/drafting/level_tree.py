"""Growing drafts level by level: one forward over the frontiers of all requests, then children for each frontier.

    frontiers   root                  a   b                    c d
    forward     scores of the root    scores of a and b        …           all requests in one call
    children    a b                   c d                      …           each request for itself

A chain is a tree with one node a level. Drafters share this loop and differ in the network that scores a level
(``read``) and in the nodes that they keep (``extend``).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.models.language_model import Output

Growing = TypeVar("Growing", bound=DraftBuilder)


def grow_levels(
    drafts: Sequence[Growing],
    read: Callable[[Sequence[Growing]], tuple[Output, Sequence[int]]],
    columns: DraftColumns,
    extend: Callable[[Growing, Output, int], None],
    *,
    top: int,
) -> None:
    """Grow drafts until none of them has a frontier left.

    Args:
        read: scores the frontiers of drafts; returns the output, and each draft's first row in it.
        columns: the tokens that each request's draft may consist of.
        extend: adds the children of one draft's frontier and replaces the frontier, given scores and the first row.
        top: tokens of each row to rank.
    """
    active = list(drafts)
    while active:
        output, starts = read(active)
        for draft, start in zip(active, starts, strict=True):
            stop, own = start + len(draft.frontier), draft.budget.history_only
            extend(draft, *columns.view(output, start, stop, draft.context, top=top, own=own))
        active = [draft for draft in active if draft.frontier]


def extend_chain(draft: DraftBuilder, output: Output, row: int, name: str) -> None:
    """Give the last node of a chain its child, if the controller allows it; it is the frontier if more may follow.

    Args:
        output, row: the scores of the last node.
        name: of the drafting model, for messages.
    """
    node = draft.draw(output, row, name, if_it_pays=True)
    draft.frontier = [node] if node is not None and draft.has_room(node) else []
