"""Causal-consistency path search: a token for each slot such that the whole reads from left to right.

    S(path) = sum over i of  balance * l_i(x_i) + (1 - balance) * log p_ng(x_i | x_{i-2}, x_{i-1})         natural logs

Paper: DiffuSpec, arXiv:2510.02358, section 4.2. Pruning keeps the fewest tokens of a slot whose probabilities sum to
``mass``; a left-to-right beam keeps the best ``width`` paths; a path that has ended is not extended. Of equal scores
the smaller token ids go first. Trees: the best nodes by S of their path (ours; DDTree, arXiv:2604.12989, has the
product of the l_i), best first, which is what a beam without a bound would leave of its paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest

Grams = Callable[[int, int, Sequence[int]], Sequence[float]]
"""(u, v, tokens) -> log p(token | u, v) of each."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is left of one slot after pruning.

    Attributes:
        tokens: most probable first.
        logs: natural logarithms of their probabilities.
    """

    tokens: tuple[int, ...]
    logs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scoring:
    """By what paths are compared.

    Attributes:
        balance: weight of the lattice; 1: the n-gram model is not asked.
        grams: the n-gram model; None: there is none, and the lattice decides alone.
    """

    balance: float = 1.0
    grams: Grams | None = None

    def of(self, u: int, v: int, slot: Candidates) -> Sequence[float]:
        """The share of S that each candidate adds after the tokens u and v."""
        if self.grams is None or self.balance == 1.0:
            return slot.logs
        fluent = self.grams(u, v, slot.tokens)
        return [self.balance * a + (1 - self.balance) * b for a, b in zip(slot.logs, fluent, strict=True)]


def prune(
    ids: Sequence[int], shares: Sequence[float], *, mass: float, most: int, ends: Collection[int] = ()
) -> Candidates:
    """The fewest best tokens that have ``mass``, from 1 to ``most``; an end token that is ranked always stays.

    Args:
        ids, shares: of the ranked tokens, best first.
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
        tokens: of the slots from the first one on.
        logs: what the lattice gives each.
        score: S.
    """

    tokens: tuple[int, ...] = ()
    logs: tuple[float, ...] = ()
    score: float = 0.0


def best_path(
    slots: Sequence[Candidates], past: tuple[int, int], scoring: Scoring, *, width: int, ends: Collection[int] = ()
) -> Path:
    """The best path that a beam of ``width`` finds.

    Args:
        past: the last two tokens of the text.
        ends: tokens after which nothing follows: such a path is frozen, and compared by its sum as it is.
    """
    beam: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [(0.0, (), ())]  # minus S, tokens, logs
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
        token: its own.
        parent: number of the node above it, -1 for the root.
        log: what the lattice gives it.
    """

    token: int
    parent: int
    log: float


def best_nodes(
    slots: Sequence[Candidates], past: tuple[int, int], scoring: Scoring, *, ends: Collection[int] = ()
) -> Iterator[Node]:
    """The nodes of all paths, best path first; a parent comes before its children. The caller stops when it has enough.

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
