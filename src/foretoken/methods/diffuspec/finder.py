"""Searches a draft in a lattice: in one native call with a compiled decoder, else in Python (search.py)."""

from collections.abc import Collection, Iterable, Sequence

from foretoken.methods.diffuspec.lattice import Lattice
from foretoken.methods.diffuspec.native import paths
from foretoken.methods.diffuspec.search import Node, Scoring, best_nodes, best_path, prune
from foretoken.methods.diffuspec.trigram import Trigram
from foretoken.native import build


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
