"""The fields of a GGUF file that describe its architecture, each checked before it is used."""

from __future__ import annotations

import math
import struct
from typing import Any

from foretoken.core.errors import ModelError
from foretoken.models.gguf.container import GGUFFile

_MOST = 2**31 - 1  # of a size


class Fields:
    """A file's fields by their names within its architecture (``block_count`` of ``llama.block_count``).

    Attributes:
        architecture: the value of ``general.architecture``.
        tensors: the names of the file's tensors.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.tensors = set(file.entries)
        self.architecture: str = self.field("general.architecture", str, general=True)

    def __contains__(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._file.fields

    def size(self, name: str, *, absent: int | None = None) -> int:
        """A positive whole number.

        Raises:
            ModelError: it is missing, or none.
        """
        found: int = self.field(name, int, absent=absent)
        if not 1 <= found <= _MOST:
            raise ModelError(f"model '{self._file.path}': its field '{self.architecture}.{name}' is {found}")
        return found

    def number(self, name: str, least: float = 0.0, most: float = math.inf, *, absent: float | None = None) -> float:
        """A positive number within bounds, as the decimal that a config has.

        Raises:
            ModelError: it is missing, or out of bounds.
        """
        found: float = self.field(name, float, absent=absent)
        if not least <= found <= most:
            raise ModelError(f"model '{self._file.path}': its field '{self.architecture}.{name}' is {found}")
        return _shortest(found)

    def field(self, name: str, kind: type, *, general: bool = False, absent: Any = None) -> Any:
        """A value of a type.

        Args:
            general: the name is whole, with no architecture before it.
        Raises:
            ModelError: it is missing, of another type, or no positive finite number.
        """
        full = name if general else f"{self.architecture}.{name}"
        found = self._file.fields.get(full, absent)
        odd = not isinstance(found, kind) or (kind is int and isinstance(found, bool))
        if odd or (isinstance(found, float) and not 0.0 < found < math.inf):
            what = "is missing" if found is None else f"is {found!r:.40}"
            raise ModelError(f"model '{self._file.path}': its field '{full}' {what}")
        return found


def _shortest(number: float) -> float:
    """The shortest decimal that gives this float32: 1e-06 and not 9.999999974752427e-07, as a config has it."""
    single = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((short for short in candidates if struct.pack("<f", short) == single), number)
