"""Trees of several sources merged by longest prefix; and the best part of the result within a step's budget.

    draft       root ─ a ─ b          datastore   root ─┬─ a ─ c ─ d
                                                        └─ x
    union       root ─┬─ a ─┬─ b
                      │     └─ c ─ d     every path of every tree, children of one node differ
                      └─ x

The draft's nodes keep their numbers and come first, so that the drafter understands the outcomes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush

from foretoken.core.draft import Draft
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT, TokenTree

DRAFT, DATASTORE, PROMPT = "draft", "datastore", "prompt"
_UNKNOWN = 0.5  # confidence of a drafter that reports none


class Union:
    """The merged trees of one request.

    Args:
        drafts: source -> its draft; the inner drafter's first.

    Attributes:
        num_drafted: nodes of the first draft; they keep their numbers.
        evidence: for each node, source -> the node's probability given its parent.
        proposed: for each node, the sources that proposed it.
        pruned: retrieved nodes that are not selected, nor their descendants.
    """

    def __init__(self, drafts: Mapping[str, Draft]) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._place: dict[tuple[int, int], int] = {}
        self.num_drafted = len(next(iter(drafts.values())))
        self.evidence: list[dict[str, float]] = []
        self.proposed: list[list[str]] = []
        self.pruned: frozenset[int] = frozenset()
        for source, draft in drafts.items():
            self._add(source, draft)

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def tree(self) -> TokenTree:
        """The whole union as a tree."""
        return TokenTree(self._tokens, self._parents)

    def score(self, source: str, probabilities: Sequence[float]) -> None:
        """Store a source's probabilities of all nodes as evidence, including nodes that it did not propose."""
        for evidence, value in zip(self.evidence, probabilities, strict=True):
            others = {name: each for name, each in evidence.items() if name != source}
            evidence.clear()
            evidence[source] = value  # first, as if the source had proposed the node itself
            evidence.update(others)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node with the given token."""
        return self._place.get((node, token))

    def select(self, estimate: Callable[[Mapping[str, float]], float], budget: Budget, least: float) -> "Selection":
        """Select the nodes most likely to be accepted, within the budget and its stop rule.

        Args:
            estimate: probability of a node from its evidence.
            budget: limits nodes and depth.
            least: retrieved nodes with a lower estimate are pruned, with their descendants.
        """
        children = self.tree.children
        chosen: list[int] = []
        confidences: list[float] = []
        # (-reach, node): the first proposed wins ties
        frontier: list[tuple[float, int, float, float]] = []

        def consider(parent: int, reach: float) -> None:
            for node in children.get(parent, ()):
                confidence = estimate(self.evidence[node])
                if node >= self.num_drafted and (node in self.pruned or reach * confidence < least):
                    continue
                if self.tree.depths[node] <= budget.max_depth:
                    heappush(frontier, (-reach * confidence, node, reach, confidence))

        consider(ROOT, 1.0)
        while frontier and len(chosen) < budget.max_nodes:
            negative, node, reach, confidence = heappop(frontier)
            rule = budget.stop_rule
            if rule is not None and not rule.worthwhile(reach, confidence, len(chosen)):
                break  # all remaining nodes are less likely to be accepted
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
    """A connected part of a union; parents come first.

    Args:
        union: source of the nodes.
        chosen: in the order of choice.
        confidences: of the chosen.

    Attributes:
        nodes: for each selected node, its number in the union.
    """

    def __init__(self, union: Union, chosen: Sequence[int], confidences: Sequence[float]) -> None:
        place = {ROOT: ROOT} | {node: number for number, node in enumerate(chosen)}
        self.nodes = tuple(chosen)
        self.tree = TokenTree(
            [union.tree.tokens[node] for node in chosen], [place[union.tree.parents[node]] for node in chosen]
        )
        self.confidence = tuple(min(1.0, max(1e-6, each)) for each in confidences)
        self.sources = tuple("+".join(union.proposed[node]) for node in chosen)
