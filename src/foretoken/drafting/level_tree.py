"""Growing drafts level by level: one forward over the frontiers of all requests, then children for each frontier.

    frontiers   root                  a   b                    c d
    forward     scores of the root    scores of a and b        …           all requests in one call
    children    a b                   c d                      …           each request for itself

A chain is a tree with one node a level. Drafters share this loop and differ in the network that scores a level
(``read``) and in the nodes that they keep (``extend``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.core.draft import Sampled, Tabulated, TopThenSampled, WithoutReplacement
from foretoken.core.siblings import draw_siblings
from foretoken.drafting.draft_builder import DraftBuilder, check_numbers
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.models.language_model import Output

DRAWN: Mapping[str, type[Tabulated]] = {  # those with the higher optimum first
    "sampled_without_replacement": WithoutReplacement,
    "sampled": Sampled,
    "top_then_sampled": TopThenSampled,
}
"""Trees of drawn children, by the names that users type."""

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


def extend_drawn(
    draft: DraftBuilder, output: Output, first: int, kind: type[Tabulated], *, count: int, name: str
) -> None:
    """Draw children of the frontier; the likeliest of them are the next one.

    Whether to draw a node's children is decided from q alone, before the draw; then all of them stay.

    Args:
        output, first: scores of the frontier, and the row of its first node.
        kind: how siblings are drawn.
        count: children of a node, and nodes of the next frontier, at most.
        name: of the drafting model, for messages.
    """
    logits_MV = output.logits_MV[first : first + len(draft.frontier)]
    q_MV = torch.softmax(draft.process(logits_MV, output.columns), dim=-1)
    if bool(q_MV[:, 0].isnan().any()):
        check_numbers(logits_MV, name)
    # sum q^2 is the chance that an independent draw from q agrees: known before the draw
    agreement = (q_MV * q_MV).sum(-1).tolist()
    fresh: list[tuple[float, int]] = []
    for row, parent in enumerate(draft.frontier):
        reach = draft.reach_of(parent)
        room = draft.budget.max_nodes - len(draft.tokens)
        # sqrt: a drawn token stands with probability sum min(p, q), which is far above sum q^2 when p is near q
        confidence = agreement[row] ** 0.5
        possible = confidence == confidence  # else no token of this row may be emitted
        if room <= 0 or not possible or not draft.pays(reach, confidence):
            continue
        q_V = q_MV[row]
        tokens = draw_siblings(kind, q_V, min(count, room), draft.context.streams, output.columns)
        number = draft.keep(q_V, output.columns)
        nodes = [draft.add(token, parent, confidence, number) for token in tokens]
        shares = _shares(kind, q_V, len(nodes))
        fresh += [(draft.reach[node] * share, node) for node, share in zip(nodes, shares, strict=True)]
    fresh.sort(key=lambda each: -each[0])
    draft.frontier = [node for _, node in fresh[:count] if draft.has_room(node)]


def _shares(kind: type[Tabulated], q_V: Tensor, count: int) -> list[float]:
    """The probability that each sibling is the accepted one, if p is q; independent of the drawn tokens."""
    if kind is not TopThenSampled or count == 1:
        return [1.0] * count
    top = q_V.topk(count - 1).values.tolist()
    return [*top, max(0.0, 1.0 - sum(top))]
