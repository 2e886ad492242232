"""The fields of a GGUF file that describe its architecture, each checked before it is used."""

import json
import math
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from foretoken.core.errors import ModelError, UnsupportedArchitecture
from foretoken.models.gguf.container import Entry, GGUFFile

_MOST = 2**31 - 1  # of a size
# fields that could change the computation, and their neutral values
_NEUTRAL: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["neutral"]


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

    def embedding(self) -> Entry:
        """The matrix of the embedding, which says how many tokens there are.

        Raises:
            ModelError: it is missing, or no matrix.
        """
        found = self._file.entries.get("token_embd.weight")
        if found is None:
            raise ModelError(f"model '{self._file.path}' has no tensor 'token_embd.weight'")
        if len(found.shape) != 2:
            raise ModelError(
                f"model '{self._file.path}': its tensor 'token_embd.weight' has the shape {list(found.shape)}"
            )
        return found

    def ends(self) -> list[int] | None:
        """Tokens that end an answer: the end of text, of a turn, and of a message."""
        found = (self.token(each) for each in ("eos", "eot", "eom"))
        return sorted({each for each in found if each is not None}) or None

    def token(self, name: str) -> int | None:
        """A token that the file names; None: it does not.

        Raises:
            ModelError: there are fewer tokens.
        """
        full, size = f"tokenizer.ggml.{name}_token_id", self.embedding().shape[0]
        if full not in self._file.fields:
            return None
        found: int = self.field(full, int, general=True)
        if not 0 <= found < size:
            raise ModelError(f"model '{self._file.path}': its field '{full}' is {found}, of {size} tokens")
        return found


def _shortest(number: float) -> float:
    """The shortest decimal that gives this float32: 1e-06 and not 9.999999974752427e-07, as a config has it."""
    single = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((short for short in candidates if struct.pack("<f", short) == single), number)


def refuse_uncomputed(file: GGUFFile, read: Collection[str], also: Collection[str] = ()) -> None:
    """Refuse a field that changes the computation, and that nothing reads.

    Args:
        read: fields that the architecture reads.
        also: more fields that must be absent.
    Raises:
        UnsupportedArchitecture: its name and value.
    """
    architecture = file.fields["general.architecture"]
    for name, neutral in {**_NEUTRAL, **dict.fromkeys(also)}.items():
        found = file.fields.get(f"{architecture}.{name}", neutral)
        if found != neutral and name not in read:
            raise UnsupportedArchitecture(
                f"model '{file.path}': its field '{architecture}.{name}' is {found!r:.40}, which is not computed"
            )
