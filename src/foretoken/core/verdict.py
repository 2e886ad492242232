"""What a verifier decides about one draft."""

from dataclasses import dataclass
from typing import Protocol

from foretoken.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and the one token that every step adds.

    Attributes:
        path: accepted node indices from a child of the root downwards; may be empty.
        extra: the token after the path: a correction where the draft was refused, else the bonus.
        distortions: total variation between the distribution of each emitted token (the path's, then the extra one) and
            the target's distribution, as core/distortion.py defines it; empty for a lossless rule.
        divergences: their KL divergence in nats, likewise; infinite where the target could not have emitted a token.
    """

    path: tuple[int, ...]
    extra: int
    distortions: tuple[float, ...] = ()
    divergences: tuple[float, ...] = ()

    @property
    def distortion(self) -> float:
        """The distortion of the step: the sum over its tokens; 0 for a lossless rule."""
        return sum(self.distortions, 0.0)


class Choices(Protocol):
    """The token that the target chose in each row; row 0 is the root, row i + 1 is node i. A list will do."""

    def __getitem__(self, row: int, /) -> int: ...


def follow(tree: TokenTree, chosen: Choices) -> Verdict:
    """Walk down from the root as long as a child carries the chosen token; the first choice without a child is extra.

    Plain Python on tuples: a step looks at a handful of nodes, and one tensor operation costs more than the walk.
    Only the rows on the walked path are looked up.
    """
    if tree.is_chain:
        row = 0
        for token in tree.tokens:
            if chosen[row] != token:
                break
            row += 1
        return Verdict(tuple(range(row)), chosen[row])
    path: list[int] = []
    node = ROOT
    while True:
        choice = chosen[node + 1]
        for child in tree.children.get(node, ()):
            if tree.tokens[child] == choice:
                path.append(child)
                node = child
                break
        else:
            return Verdict(tuple(path), choice)
