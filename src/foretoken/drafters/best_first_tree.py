"""A draft tree grown best-first: the node that is most likely to be accepted is always added next.

    frontier    continuations of nodes that are in the tree, by the probability of their path
    step        the best of them becomes a node; its own continuations join the frontier

Paper: SuffixDecoding, arXiv:2411.04975, and REST, arXiv:2311.08252, grow their trees by the product of frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT, TokenTree

Place = TypeVar("Place")


def grow(
    budget: Budget,
    root: Place,
    continuations: Callable[[int, int, Place], Iterable[tuple[float, int, Place]]],
    min_score: float,
) -> Draft:
    """Grow a tree until the frontier is empty, the budget is used up, or its stop rule ends it.

    Args:
        root: the drafter's state at the root.
        continuations: of a node, given its number, its depth and the drafter's state there: (confidence, token, state)
            of each, most probable first.
        min_score: least probability of a node's path.
    Returns:
        point masses, with the confidence of each node.
    """
    max_nodes, max_depth, stop_rule = budget.max_nodes, budget.max_depth, budget.stop_rule
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    # (-score, serial, token, parent, depth, reach, confidence, place); the serial settles ties
    frontier: list[tuple[float, int, int, int, int, float, float, Place]] = []
    serial, node, depth, reach, place = 0, ROOT, 0, 1.0, root
    while True:
        if depth < max_depth:
            for confidence, token, following in continuations(node, depth, place):
                score = reach * confidence
                if score < min_score:
                    break
                heappush(frontier, (-score, serial, token, node, depth + 1, reach, confidence, following))
                serial += 1
        if not frontier or len(tokens) >= max_nodes:
            break
        score, _, token, parent, depth, reach, confidence, place = heappop(frontier)
        if stop_rule is not None and not stop_rule.worthwhile(reach, confidence, len(tokens)):
            break  # the rest of the frontier is less likely to be accepted
        node, reach = len(tokens), -score
        tokens.append(token)
        parents.append(parent)
        confidences.append(confidence)
    return Draft(TokenTree(tokens, parents), confidence=tuple(confidences)) if tokens else NO_DRAFT
