"""The number of nodes per request by the number of requests: ``k_opt(b)``, a measured table of one machine.

    widths.json   {"format": 1, "algorithm": "scylla_widths", "unit": "verified nodes per sequence",
                   "target_fingerprint": "...", "widths": [[1, 16], [4, 8], [8, 2]], and the measurements}

Widths between measured batches are interpolated; larger batches have the last width. 0: no drafts.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import ModelError
from foretoken.core.files import check_format

FILE = "widths.json"
KIND = "scylla_widths"
FORMAT = 1
_REMEDY = "make one with 'foretoken calibrate scylla --model M --head DIR'"


@dataclass(frozen=True)
class Widths:
    """The table of widths.

    Attributes:
        table: (requests, nodes), requests increasing, nodes not increasing.
    Raises:
        ValueError: the table is invalid.
    """

    table: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("widths is empty")
        for pair in self.table:
            if len(pair) != 2 or any(type(each) is not int for each in pair) or pair[0] < 1 or not 0 <= pair[1] <= 256:
                raise ValueError(f"widths has {list(pair)}: pairs of requests and nodes are wanted")
        for (batch, nodes), (more, fewer) in zip(self.table, self.table[1:], strict=False):
            if more <= batch:
                raise ValueError(f"widths: {more} requests come after {batch}")
            if fewer > nodes:
                raise ValueError(f"widths: {fewer} nodes for {more} requests, but {nodes} for {batch}")

    def at(self, batch: int) -> int:
        """Return the nodes of each request for this number of decoding requests."""
        before = self.table[0]
        for pair in self.table:
            if batch <= pair[0]:
                if pair[0] == before[0]:
                    return pair[1]
                share = (batch - before[0]) / (pair[0] - before[0])
                return int(before[1] + share * (pair[1] - before[1]))
            before = pair
        return before[1]

    @property
    def most(self) -> int:
        """The largest width."""
        return self.table[0][1]

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> "Widths":
        """Read a file.

        Args:
            fingerprint: of the target; the file must have been measured with it.
        Raises:
            ModelError: the file does not exist, is damaged, or belongs to another target.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("algorithm") != KIND:
                raise ValueError(f"it has no algorithm '{KIND}'")
            check_format(found.get("format", 1), FORMAT)
            table = found.get("widths")
            if not isinstance(table, list) or not all(isinstance(pair, list) for pair in table):
                raise ValueError(f"widths={table!r}: pairs of requests and nodes are wanted")
            widths = cls(tuple(tuple(pair) for pair in table))
        except (OSError, ValueError) as error:
            raise ModelError(f"widths={path}: {error}; {_REMEDY}") from None
        if found.get("target_fingerprint") != fingerprint:
            raise ModelError(f"widths={path}: was measured with another target ('{found.get('target')}'); {_REMEDY}")
        return widths
