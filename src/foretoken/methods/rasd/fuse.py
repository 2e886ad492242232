"""Trees of several sources as one, by longest prefix; and the best part of it that a step has room for.

    draft       root ─ a ─ b          datastore   root ─┬─ a ─ c ─ d
                                                        └─ x
    union       root ─┬─ a ─┬─ b
                      │     └─ c ─ d     every path of every tree, children of one node differ
                      └─ x

The draft's nodes keep their numbers and come first, so that a drafter can be told in these what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush

from foretoken.core.draft import Draft
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT, TokenTree

DRAFT, DATASTORE, PROMPT = "draft", "datastore", "prompt"
_UNKNOWN = 0.5  # of a drafter that says no confidence


class Union:
    """The trees of one request, one on the other.

    Args:
        drafts: source -> what it proposed; the drafter's own first.

    Attributes:
        num_drafted: nodes of the first draft; they have the numbers that they had there.
        evidence: of each node, source -> the probability that it gives the node given its parent.
        proposed: of each node, the sources that proposed it.
    """

    def __init__(self, drafts: Mapping[str, Draft]) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._place: dict[tuple[int, int], int] = {}
        self.num_drafted = len(next(iter(drafts.values())))
        self.evidence: list[dict[str, float]] = []
        self.proposed: list[list[str]] = []
        for source, draft in drafts.items():
            self._add(source, draft)

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def tree(self) -> TokenTree:
        """All of it."""
        return TokenTree(self._tokens, self._parents)

    def score(self, source: str, probabilities: Sequence[float]) -> None:
        """Take what a source gives every node, also those that it did not propose, as its evidence."""
        for evidence, value in zip(self.evidence, probabilities, strict=True):
            others = {name: each for name, each in evidence.items() if name != source}
            evidence.clear()
            evidence[source] = value  # in front, as where the source proposed the node itself
            evidence.update(others)

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that carries a token."""
        return self._place.get((node, token))

    def select(self, estimate: Callable[[Mapping[str, float]], float], budget: Budget, least: float) -> Selection:
        """The nodes that are most likely to stand, as far as the budget and its stop rule go.

        Args:
            estimate: probability of a node from its evidence.
            budget: bounds nodes and depth.
            least: retrieved nodes that stand with less are pruned, and what hangs on them.
        """
        children = self.tree.children
        chosen: list[int] = []
        confidences: list[float] = []
        # (-reach, node): of equal ones the first proposed
        frontier: list[tuple[float, int, float, float]] = []

        def consider(parent: int, reach: float) -> None:
            for node in children.get(parent, ()):
                confidence = estimate(self.evidence[node])
                if node >= self.num_drafted and reach * confidence < least:
                    continue
                if self.tree.depths[node] <= budget.max_depth:
                    heappush(frontier, (-reach * confidence, node, reach, confidence))

        consider(ROOT, 1.0)
        while frontier and len(chosen) < budget.max_nodes:
            negative, node, reach, confidence = heappop(frontier)
            rule = budget.stop_rule
            if rule is not None and not rule.worthwhile(reach, confidence, len(chosen)):
                break  # what is left is less likely to stand
            chosen.append(node)
            confidences.append(confidence)
            consider(node, -negative)
        return Selection(self, chosen, confidences)

    def _add(self, source: str, draft: Draft) -> None:
        tree = draft.tree
        at = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            key = at[parent], token
            found = self._place.get(key)
            if found is None:
                found = self._place[key] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(at[parent])
                self.evidence.append({})
                self.proposed.append([])
            at[node] = found
            self.proposed[found].append(source)
            self.evidence[found][source] = draft.confidence[node] if draft.confidence else _UNKNOWN


class Selection:
    """A part of a union that hangs together, in an order in which parents come first.

    Args:
        union: whose nodes.
        chosen: in the order of choice.
        confidences: of the chosen.

    Attributes:
        nodes: of each selected node, its number in the union.
    """

    def __init__(self, union: Union, chosen: Sequence[int], confidences: Sequence[float]) -> None:
        place = {ROOT: ROOT} | {node: number for number, node in enumerate(chosen)}
        self.nodes = tuple(chosen)
        self.tree = TokenTree(
            [union.tree.tokens[node] for node in chosen], [place[union.tree.parents[node]] for node in chosen]
        )
        self.confidence = tuple(min(1.0, max(1e-6, each)) for each in confidences)
        self.sources = tuple("+".join(union.proposed[node]) for node in chosen)
