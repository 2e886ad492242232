"""The rule that stops a draft, applied before each node, and its outlook: the same rule stated beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a stop rule is going to decide, for code that reads several nodes of a chain in one go; not binding.

    A node is foreseen to pay if ``reach * stands[of its tenth of confidence]`` exceeds what a node must promise. (The
    engine's rules correct the reach, too, which is left out here.)

    Attributes:
        stands: of each tenth of confidence, the probability that such a node stands.
        first, later: what the first node, and what a later one, must promise.
        free: nodes that need not.
    """

    stands: tuple[float, ...]
    first: float
    later: float
    free: int = 0


NO_LIMIT = Outlook((1.0,) * 10, -1.0, -1.0)  # every node pays


class StopRule(Protocol):
    """Decides while a draft grows whether one more node is worth its time. See engine/draft_length/controller.py."""

    def outlook(self) -> Outlook | None:
        """How it is going to decide; None: unknown."""
        return None

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """True if drafting and verifying one more node is expected to raise tokens per second.

        Args:
            reach: the product of the drafter's confidences in the nodes above it, 1 at the root.
            confidence: the drafter's estimate that the node stands given its parent does.
            num_nodes: nodes already in this draft.
        """
        ...

    def rate(self, num_nodes: int) -> float:
        """Expected tokens of a step with the first nodes of this draft, per token of plain decoding in its time.

        0: unknown.
        """
        return 0.0

    def after(self, first: "StopRule", confidence: Sequence[float]) -> "StopRule":
        """The rule of nodes that follow a chain which another rule has let through.

        Args:
            first: the chain's rule.
            confidence: in each node of the chain.
        """
        return self
