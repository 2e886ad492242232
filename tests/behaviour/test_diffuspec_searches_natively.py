"""The native search against the one that is written out: the same paths, trees and logarithms, to the bit."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest

from foretoken.methods.diffuspec.lattice import Lattice
from foretoken.methods.diffuspec.native import paths
from foretoken.methods.diffuspec.search import Finder, Node
from foretoken.methods.diffuspec.trigram import Trigram
from foretoken.native import build

VOCAB = 40
pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no compiled decoder on this machine")


def trigram(seed: int, *, least: int = 1) -> Trigram:
    rng = random.Random(seed)
    texts = [[min(rng.randrange(VOCAB), rng.randrange(VOCAB)) for _ in range(60)] for _ in range(4)]
    return Trigram.fit(texts, VOCAB, least=least)


class Ranked:
    """The part of an output that a search reads."""

    def __init__(self, seed: int, rows: int, top: int, levels: int) -> None:
        rng = random.Random(seed)
        self.best = [0] * rows
        self.top_ids: list[int] = []
        self.top_shares: list[float] = []
        for _ in range(rows):
            # few levels, so that scores are often equal, and some tokens without any probability
            shares = sorted((rng.randrange(levels) / levels / top for _ in range(top)), reverse=True)
            self.top_ids += rng.sample(range(VOCAB), top)
            self.top_shares += [float(paths.array("f", [share])[0]) for share in shares]


def both(finder: Finder, lattice: Lattice, slots: int, **how: Any) -> tuple[list[Node], list[Node]]:
    given = ((3, 5), frozenset({7, 11, 30}))
    found = list(finder.nodes(lattice, slots, *given, **how))
    with mock.patch.object(finder, "_library", None):
        written = list(itertools.islice(finder.nodes(lattice, slots, *given, **how), how["most"]))
    return found, written


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("balance", [1.0, 0.5, 0.0])
def test_paths_and_trees_are_the_written_out_ones(balance: float, tree: bool) -> None:
    """Beams of one and more, ends that freeze a path, contexts that were never seen, equal scores, empty slots."""
    lengths = set()
    for seed in range(60):
        rng = random.Random(seed)
        top, slots = rng.choice([1, 4, 15]), rng.randrange(1, 9)
        finder = Finder(
            mass=rng.choice([0.0, 0.5, 1.0]),
            candidates=rng.choice([1, 3, 15]),
            beam=rng.choice([1, 3, 8]),
            balance=balance,
            trigram=None if seed % 5 == 0 else trigram(seed, least=1 + seed % 2),
        )
        lattice = Lattice(Ranked(seed, slots + 2, top, rng.choice([3, 1000])), rng.randrange(3), slots)
        found, written = both(finder, lattice, slots, most=rng.choice([slots, 40]) if tree else slots, tree=tree)
        assert found == written, seed
        lengths.add(len(found))
    assert len(lengths) > 4


def test_nothing_is_found_where_nothing_may_be() -> None:
    finder = Finder(mass=0.8, candidates=15, beam=3, balance=1.0, trigram=None)
    lattice = Lattice(Ranked(1, 4, 5, 1000), 0, 4)
    assert not list(finder.nodes(lattice, 0, (1, 2), (), most=4, tree=False))
    assert not list(finder.nodes(lattice, 4, (1, 2), (), most=0, tree=True))
    library = build.library()
    assert library is not None
    for slots, ids in ((65, [0] * 65), (2, [0] * 3)):
        with pytest.raises(ValueError, match=f"{slots} slots with"):
            paths.found(
                library, finder._rules, ids, [0.5] * len(ids), slots=slots, past=(1, 2), ends=(), nodes=4, tree=True
            )
