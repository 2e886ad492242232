"""How often draft nodes stand, by the confidence that their drafter had in them."""

from collections.abc import Sequence
from operator import truediv

from foretoken.core.draft import Draft
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict

_BINS = 10
_PRIOR = 8.0  # a bin starts as so many observations that agree with the drafter
_LEAST = 0.01  # probability of a node in a request of many misses
_MEMORY = 200.0  # observations that a bin averages over


class Confidence:
    """Corrects a drafter's confidences by what became of its nodes.

    Attributes:
        stood, seen: of each bin of confidence, nodes that stood and nodes that were put to the test.
    """

    def __init__(self) -> None:
        self.stood = [_PRIOR * (i + 0.5) / _BINS for i in range(_BINS)]
        self.seen = [_PRIOR] * _BINS

    def stands(self, confidence: float) -> float:
        """Probability that a node of that confidence stands, given that its parent does."""
        index = _bin(confidence)
        return self.stood[index] / self.seen[index]

    def by_tenth(self) -> tuple[float, ...]:
        """:meth:`stands` of each tenth of confidence."""
        return tuple(map(truediv, self.stood, self.seen))

    def recall(self, by_tenth: Sequence[float]) -> None:
        """Begin with the probabilities of a former run, in place of the drafter's own."""
        self.stood = [stands * seen for stands, seen in zip(by_tenth, self.seen, strict=True)]

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Compare confidences with acceptance: every child of an accepted node was tested."""
        if not draft.confidence:
            return
        accepted = set(verdict.path)
        for node, parent in enumerate(draft.tree.parents):
            if parent == ROOT or parent in accepted:
                index = _bin(draft.confidence[node])
                if self.seen[index] >= _MEMORY:
                    self.seen[index] *= 0.5
                    self.stood[index] *= 0.5
                self.seen[index] += 1.0
                self.stood[index] += node in accepted


class Reaches:
    """Corrects how likely whole paths of one draft stand: a path's error is the product of its nodes' errors.

    A drafter says of a node's parent how likely it stands by its own confidences, multiplied along the path. What that
    product is called here identifies the path, and its result is remembered for the nodes below.

    Args:
        confidence: corrects each node.
        misses: how often nodes fall in this request, as a multiple of how often such nodes fall.
    """

    __slots__ = ("_by_tenth", "_of")

    def __init__(self, confidence: Confidence, misses: float = 1.0) -> None:
        self._by_tenth = [max(_LEAST, 1.0 - (1.0 - stands) * misses) for stands in confidence.by_tenth()]
        self._of = {1.0: 1.0}

    def stands(self, reach: float, confidence: float) -> float:
        """Probability that a node stands, and all above it; of an unknown path its ``reach`` is believed.

        Args:
            reach: the product of the drafter's own confidences in the nodes above it.
            confidence: the drafter's, in the node itself.
        """
        found = self._of.get(reach, reach) * self._by_tenth[_bin(confidence)]
        self._of[reach * confidence] = found
        return found


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))
