"""A draft tree grown best-first: the node that is most likely to be accepted is always added next.

    frontier    continuations of nodes that are in the tree, by the probability of their path
    step        the best of them becomes a node; its own continuations join the frontier

Paper: SuffixDecoding, arXiv:2411.04975, and REST, arXiv:2311.08252, grow their trees by the product of frequencies.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated, TypeVar

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT, TokenTree
from foretoken.drafters.agreement import LONGEST_MATCH
from foretoken.options.option import Checked, Option

Place = TypeVar("Place")


@dataclass(frozen=True, kw_only=True)
class TreeOfCopies(Checked):
    """Options of drafters that grow such a tree from contexts that occurred before."""

    min_match: Annotated[int, Option("Shortest context, in tokens, that is drafted from.", least=1)] = 1
    max_match: Annotated[
        int,
        Option(
            "Longest context, in tokens; a longer one is cut. It bounds the work per token.",
            least=1,
            most=LONGEST_MATCH,
            remedy="every length has a rate of its own",
        ),
    ] = 16
    min_score: Annotated[
        float,
        Option(
            "Nodes with a lower estimated probability of acceptance are left out; 0 drafts the full budget.",
            least=0,
            below=1,
            remedy="use 0 to keep every node",
        ),
    ] = 0.05
    max_branching: Annotated[
        int, Option("Continuations that are tried after one node, at most; most frequent first.", least=1)
    ] = 4
    tree: Annotated[bool, Option("Draft a tree; false drafts a chain of the most frequent continuations.")] = True

    def check_together(self) -> None:
        if self.min_match > self.max_match:
            raise ConfigError(
                f"min_match={self.min_match} is greater than max_match={self.max_match}: lower one or raise the other"
            )

    @property
    def branching(self) -> int:
        """Continuations of a node, at most."""
        return self.max_branching if self.tree else 1


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
