"""A tree that is recorded wide and proposed narrow: EAGLE-2's dynamic tree.

    recorded    every frontier node's ``width`` best tokens, level by level; the ``width`` best of a level go on
    proposed    of all that was recorded, the best nodes by the probability of their path

Paper: EAGLE-2, arXiv:2406.16858, sections 4.1 (expansion) and 4.2 (reranking). A node's path is never more probable
than its parent's, and of equal ones the elder is taken, so that the proposal is connected. Differs: a frontier
node that can have no descendant among the best is not expanded, which does not change the proposal.
"""

from dataclasses import dataclass, field
from heapq import nlargest

from foretoken.core.tree import ROOT
from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.models.language_model import Output


@dataclass(slots=True)
class RerankedBuilder(DraftBuilder):
    """A draft while it is recorded; its nodes are numbered anew by :meth:`rerank`.

    Attributes:
        expanded: the frontier that the last level hangs on.
    """

    expanded: list[int] = field(default_factory=list)

    def record_level(self, output: Output, first: int, *, width: int, name: str) -> None:
        """Record the children of the frontier; the best of them become the frontier.

        Args:
            output: of a forward that ranked at least one token of every row.
            first: the frontier's first row in it; the others follow.
            width: children of a node, and nodes that go on.
            name: of the drafting model, for messages.
        Raises:
            RequestError: the logits are NaN.
        """
        fresh: list[int] = []
        for parent, ranked in self.ranked(output, first, name):
            fresh += [self.add(token, parent, q, 0) for token, q in ranked[:width] if q > 0]
        self.expanded = self.frontier
        best = sorted(fresh, key=lambda node: (-self.reach[node], node))[:width]
        least = self._least()
        deeper = bool(best) and self.depths[best[0]] < self.budget.max_depth
        self.frontier = sorted(node for node in best if deeper and self.reach[node] > least)

    def record_beam(self, output: Output, first: int, *, width: int, name: str) -> None:
        """Record the best continuations of the whole frontier together; all of them become the frontier.

        A node without candidates stays as it is. Otherwise as :meth:`record_level`.
        """
        self.expanded = self.frontier
        fresh = [self.add(token, parent, q, 0) for _, parent, token, q in self.candidates(output, first, name)[:width]]
        least = self._least()
        self.frontier = [
            node for node in fresh if self.depths[node] < self.budget.max_depth and self.reach[node] > least
        ]

    def rerank(self) -> None:
        """Keep the best nodes, at most as many as the budget allows; the first one that does not pay ends the tree."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.reach[node], node))
        kept: list[int] = []
        for node in order[: self.budget.max_nodes]:
            if not self.pays(self.reach_of(self.parents[node]), self.confidence[node], len(kept)):
                break
            kept.append(node)
        kept.sort()
        place = {node: number for number, node in enumerate(kept)} | {ROOT: ROOT}
        self.parents = [place[self.parents[node]] for node in kept]
        for name in ("tokens", "depths", "reach", "confidence", "row_of"):
            values = getattr(self, name)
            setattr(self, name, [values[node] for node in kept])
        self.chain = all(parent == node - 1 for node, parent in enumerate(self.parents))

    def _least(self) -> float:
        """The probability that a path must exceed in order to be proposed."""
        most, least = self.budget.max_nodes, self.budget.least_reach
        return max(least, nlargest(most, self.reach)[-1]) if len(self.reach) >= most else least
