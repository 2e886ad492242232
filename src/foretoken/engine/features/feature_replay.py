"""What a drafter was shown of a prompt, kept with the slot: whoever goes on from there is shown it again.

A drafter that reads the target's hidden states needs them of every row, also of rows that are not computed again. A
row's states follow from its own past, like its keys and values, so that they are the ones that would have come.

Letters: D width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class _Rows:
    """The first rows of one slot, in pieces: depth -> [rows, D]."""

    pieces: list[Mapping[int, Tensor]] = field(default_factory=list)
    count: int = 0
    num_bytes: int = 0


class FeatureReplay:
    """Hidden states of the rows that slots begin with.

    Attributes:
        num_bytes: of all of them; what two slots share counts twice.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Rows] = {}

    @property
    def num_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self._of.values())

    def count(self, slot: int, depths: tuple[int, ...]) -> int:
        """How many rows of a slot are known at these depths."""
        rows = self._of.get(slot)
        if rows is None or not all(set(depths) <= set(piece) for piece in rows.pieces):
            return 0
        return rows.count

    def add(self, slot: int, begin: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep rows, if they follow those that are known."""
        rows = self._of.setdefault(slot, _Rows())
        if begin != rows.count or not hidden:
            return
        # copies: a piece may be a view of all that a step has computed
        self._append(rows, {depth: values.clone() for depth, values in hidden.items()})

    def copy(self, owner: int, slot: int, count: int) -> None:
        """A slot begins with so many rows of another, or of itself."""
        rows = _Rows()
        for piece in self._of[owner].pieces if count else ():
            left = count - rows.count
            if left > 0:
                self._append(rows, {depth: values[:left] for depth, values in piece.items()})
        self._of[slot] = rows

    def drop(self, slot: int) -> None:
        """Forget a slot."""
        self._of.pop(slot, None)

    def pieces(self, slot: int) -> Iterator[tuple[int, Mapping[int, Tensor]]]:
        """All rows of a slot, piece by piece: the first row's position, and depth -> [rows, D]."""
        begin = 0
        for piece in self._of[slot].pieces:
            yield begin, piece
            begin += _length(piece)

    @staticmethod
    def _append(rows: _Rows, piece: Mapping[int, Tensor]) -> None:
        rows.pieces.append(piece)
        rows.count += _length(piece)
        rows.num_bytes += sum(values.nbytes for values in piece.values())


def _length(piece: Mapping[int, Tensor]) -> int:
    return len(next(iter(piece.values())))
