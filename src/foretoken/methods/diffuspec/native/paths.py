"""Paths through a lattice in one native call (paths.h): equal to the bit to those of methods/diffuspec/search.py."""

import ctypes
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foretoken.native.declared import ADDRESS, Header, function

_HEADER = Header(Path(__file__).with_name("paths.h"))
MOST_SLOTS = 64  # of paths.h


class Order(ctypes.Structure):
    """One order of a trigram model."""

    _fields_ = _HEADER.fields("Order")


class Grams(ctypes.Structure):
    """A trigram model."""

    _fields_ = _HEADER.fields("Grams", Order)


class _Search(ctypes.Structure):
    _fields_ = _HEADER.fields("Search", Grams)


class Entries(NamedTuple):
    """One order of a trigram model, by context; see methods/diffuspec/trigram.py.

    Attributes:
        contexts: int64 [C], increasing.
        starts: int32 [C + 1].
        tokens: [N], increasing within a context; uint16 or int32.
        own: float32 [N].
        below: float32 [C].
    """

    contexts: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray
    own: np.ndarray
    below: np.ndarray


class NativeGrams:
    """A trigram model in the layout of native code.

    Args:
        single: float32 [V].
        pairs, triples: bigrams and trigrams.
    """

    def __init__(self, single: np.ndarray, pairs: Entries, triples: Entries) -> None:
        kinds = (np.int64, np.int32, None, np.float32, np.float32)
        self._keep: list[np.ndarray] = [np.ascontiguousarray(single, np.float32)]
        orders = []
        for order in (pairs, triples):
            wide = order.tokens.dtype != np.uint16
            arrays = [
                np.ascontiguousarray(each, kind or (np.int32 if wide else np.uint16))
                for each, kind in zip(order, kinds, strict=True)
            ]
            self._keep += arrays
            orders.append(Order(len(order.contexts), int(wide), *(each.ctypes.data for each in arrays)))
        self.native = Grams(len(single), self._keep[0].ctypes.data, *orders)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of the path search; see methods/diffuspec/search.py.

    Attributes:
        mass, most: limits of pruning.
        width: of the beam.
        balance: weight of the lattice.
        grams: None: scores come from the lattice alone.
    """

    mass: float
    most: int
    width: int
    balance: float
    grams: NativeGrams | None


def found(
    library: ctypes.CDLL,
    rules: Rules,
    ids: Sequence[int],
    shares: Sequence[float],
    *,
    slots: int,
    past: tuple[int, int],
    ends: Collection[int],
    nodes: int,
    tree: bool,
) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
    """Return the best path, or the best nodes of a tree: tokens, parents (-1: the root) and lattice log probabilities.

    Args:
        ids, shares: the ranked tokens of each slot, slot by slot, best first; in the trigram model's vocabulary.
        past: the last two tokens of the text.
        ends: end tokens; a path stops at the first one.
        nodes: maximum number of nodes.
    Raises:
        ValueError: more slots than native code supports.
        MemoryError: out of memory.
    """
    if not 0 < slots <= MOST_SLOTS or len(ids) != len(shares) or len(ids) % slots:
        raise ValueError(f"{slots} slots with {len(ids)} ranked tokens and {len(shares)} shares")
    top = len(ids) // slots
    of_ids, of_shares, of_ends = array("i", ids), array("f", shares), array("i", ends)
    tokens, parents, logs = (array(kind, bytes(size * nodes)) for kind, size in (("i", 4), ("i", 4), ("d", 8)))
    search = _Search(
        slots=slots,
        top=top,
        ids=of_ids.buffer_info()[0],
        shares=of_shares.buffer_info()[0],
        ends=of_ends.buffer_info()[0],
        num_ends=len(of_ends),
        most=rules.most,
        mass=rules.mass,
        balance=rules.balance,
        u=past[0],
        v=past[1],
        width=0 if tree else rules.width,
        nodes=nodes,
        tokens=tokens.buffer_info()[0],
        parents=parents.buffer_info()[0],
        logs=logs.buffer_info()[0],
    )
    if rules.grams is not None:
        search.grams = ctypes.pointer(rules.grams.native)
    if function(library, "foretoken_search", ADDRESS)(ctypes.addressof(search)):
        raise MemoryError(f"there is no memory for a search over {slots} slots")
    count: int = search.count
    return tokens[:count], parents[:count], logs[:count]
