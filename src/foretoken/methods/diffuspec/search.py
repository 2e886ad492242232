"""Causal-consistency path search: choose a token for each slot so that the path reads well from left to right.

    S(path) = sum over i of  balance * l_i(x_i) + (1 - balance) * log p_ng(x_i | x_{i-2}, x_{i-1})         natural logs

Paper: DiffuSpec, arXiv:2510.02358, section 4.2. Pruning keeps the fewest tokens of a slot with the total probability
``mass``; a left-to-right beam keeps the best ``width`` paths; a path with an end token is not extended. Ties go to
the smaller token ids. Trees contain the best nodes by S of their path, best first (ours; DDTree, arXiv:2604.12989, uses
the product of the l_i); a beam search without a width limit would find the same nodes.

With a compiled decoder :class:`Finder` does the same in one native call (native/paths.h).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest

from foretoken.methods.diffuspec.lattice import Lattice
from foretoken.methods.diffuspec.native import paths
from foretoken.methods.diffuspec.trigram import Trigram
from foretoken.native import build

Grams = Callable[[int, int, Sequence[int]], Sequence[float]]
"""(u, v, tokens) -> log p(token | u, v) of each token."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens of one slot after pruning.

    Attributes:
        tokens: most probable first.
        logs: natural logarithms of their probabilities.
    """

    tokens: tuple[int, ...]
    logs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scoring:
    """Weights of the score of a path.

    Attributes:
        balance: weight of the lattice; 1: the n-gram model is not used.
        grams: the n-gram model; None: scores come from the lattice alone.
    """

    balance: float = 1.0
    grams: Grams | None = None

    def of(self, u: int, v: int, slot: Candidates) -> Sequence[float]:
        """Return the contribution to S of each candidate after the tokens u and v."""
        if self.grams is None or self.balance == 1.0:
            return slot.logs
        fluent = self.grams(u, v, slot.tokens)
        return [self.balance * a + (1 - self.balance) * b for a, b in zip(slot.logs, fluent, strict=True)]


def prune(
    ids: Sequence[int], shares: Sequence[float], *, mass: float, most: int, ends: Collection[int] = ()
) -> Candidates:
    """Return the fewest best tokens with the mass ``mass``, from 1 to ``most``; a ranked end token always stays.

    Args:
        ids, shares: the ranked tokens and their probabilities, best first.
    """
    kept: list[tuple[int, float]] = []
    total = 0.0
    for place, (token, share) in enumerate(zip(ids, shares, strict=True)):
        if share <= 0:
            break
        if place == 0 or (place < most and total < mass) or token in ends:
            kept.append((token, math.log(share)))
        total += share
    return Candidates(tuple(token for token, _ in kept), tuple(log for _, log in kept))


@dataclass(frozen=True, slots=True)
class Path:
    """A path from the root.

    Attributes:
        tokens: tokens of the slots, from the first one on.
        logs: their log probabilities in the lattice.
        score: S.
    """

    tokens: tuple[int, ...] = ()
    logs: tuple[float, ...] = ()
    score: float = 0.0


def best_path(
    slots: Sequence[Candidates], past: tuple[int, int], scoring: Scoring, *, width: int, ends: Collection[int] = ()
) -> Path:
    """Return the best path of a beam search of ``width``.

    Args:
        past: the last two tokens of the text.
        ends: end tokens; a path that has one is not extended and keeps its score.
    """
    beam: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [(0.0, (), ())]  # -S, tokens, log probabilities
    for slot in slots:
        grown: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = []
        for path in beam:
            lost, tokens, logs = path
            if tokens and tokens[-1] in ends:
                grown.append(path)
                continue
            u, v = (*past, *tokens)[-2:]
            gains = scoring.of(u, v, slot)
            grown += [
                (lost - gain, (*tokens, token), (*logs, log))
                for token, log, gain in zip(slot.tokens, slot.logs, gains, strict=True)
            ]
        if not grown:
            break
        beam = nsmallest(width, grown)
    lost, tokens, logs = beam[0]
    return Path(tokens, logs, -lost)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a tree.

    Attributes:
        token: token id.
        parent: index of the parent node, -1 for the root.
        log: log probability in the lattice.
    """

    token: int
    parent: int
    log: float


def best_nodes(
    slots: Sequence[Candidates], past: tuple[int, int], scoring: Scoring, *, ends: Collection[int] = ()
) -> Iterator[Node]:
    """Yield the nodes of all paths, best path first; a parent precedes its children. The caller stops the iteration.

    Args:
        past, ends: as for :func:`best_path`.
    """
    waiting: list[tuple[float, tuple[int, ...], int, float]] = []
    count = 0

    def wait(path: tuple[int, ...], parent: int, score: float) -> None:
        if len(path) >= len(slots) or (path and path[-1] in ends):
            return
        slot = slots[len(path)]
        u, v = (*past, *path)[-2:]
        for token, log, gain in zip(slot.tokens, slot.logs, scoring.of(u, v, slot), strict=True):
            heappush(waiting, (-(score + gain), (*path, token), parent, log))

    wait((), -1, 0.0)
    while waiting:
        negative, path, parent, log = heappop(waiting)
        yield Node(path[-1], parent, log)
        wait(path, count, -negative)
        count += 1


class Finder:
    """Prunes lattices and searches them.

    Args:
        mass, candidates: limits of pruning.
        beam: width of the beam search.
        balance: weight of the lattice relative to the trigram model.
        trigram: None: scores come from the lattice alone.
    """

    def __init__(self, *, mass: float, candidates: int, beam: int, balance: float, trigram: Trigram | None) -> None:
        self._mass, self._candidates, self._beam = mass, candidates, beam
        self._scoring = Scoring(balance, None if trigram is None else trigram.logs)
        self._library = build.library()
        grams = None if trigram is None or self._library is None else trigram.native()
        self._rules = paths.Rules(mass, candidates, beam, balance, grams)

    def nodes(
        self, lattice: Lattice, slots: int, past: tuple[int, int], ends: Collection[int], *, most: int, tree: bool
    ) -> Iterable[Node]:
        """Return the nodes of the best path, or the best nodes of all paths, parents first.

        Args:
            slots: number of slots to search, from the first one on; each has a token with nonzero probability.
            past: the last two tokens of the text.
            ends: end tokens; a path stops at the first one.
            most: maximum number of nodes.
        """
        if not slots or not most:
            return ()
        if self._library is None:
            return self._written_out(lattice, slots, past, ends, tree=tree)
        ids, shares = lattice.ranked_all(slots)
        found = paths.found(
            self._library, self._rules, ids, shares, slots=slots, past=past, ends=ends, nodes=most, tree=tree
        )
        return map(Node, *found)

    def _written_out(
        self, lattice: Lattice, slots: int, past: tuple[int, int], ends: Collection[int], *, tree: bool
    ) -> Iterable[Node]:
        left = [
            prune(*lattice.ranked(slot), mass=self._mass, most=self._candidates, ends=ends) for slot in range(slots)
        ]
        if tree:
            return best_nodes(left, past, self._scoring, ends=ends)
        path = best_path(left, past, self._scoring, width=self._beam, ends=ends)
        parents: Sequence[int] = range(-1, len(path.tokens) - 1)
        return map(Node, path.tokens, parents, path.logs)
