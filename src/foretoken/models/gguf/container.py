"""A GGUF file: its fields, and the offsets of its tensors; their content is not read here.

    magic "GGUF", version, number of tensors, number of fields
    fields      name, type, value: the model's sizes, its tokenizer, its chat template
    tensors     name, dimensions (fastest first), kind, offset
    padding to the alignment, then the tensors' bytes

Every size is checked against the file before it is used, so that a file that is cut short or damaged is refused by
name. The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package ``gguf`` reads it, too; it
makes an array of every token, which takes thirty times as long for a large vocabulary, and it does not say which tensor
a file ends in.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from errno import ENOMEM
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError, NoMemory
from foretoken.models.gguf.magic import MAGIC

_VERSIONS = (2, 3)  # version 1 counts in 32 bits and is no longer written
_ALIGNMENT = 32  # where the file names none
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_MOST_ITEMS = 1 << 24  # of a list; the largest are vocabularies and their merges


class Damaged(ValueError):
    """A fault of the file; :class:`GGUFFile` makes a ModelError of it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        shape: as torch has it, the fastest dimension last.
        kind: ggml's number for how it is stored (models/gguf/blocks.py).
        start: its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)


class GGUFFile:
    """The fields and the tensors' places of one file, which stays mapped while this lives.

    Args:
        path: of the file.
    Attributes:
        fields: by name; numbers, strings, and lists of them.
        entries: by the tensor's name, in the file's order.
        alignment: of the first byte of every tensor.
        begin: where the first tensor lies.
    Raises:
        ModelError: it is not a GGUF file of version 2 or 3, or it is damaged.
        NoMemory: it is larger than the memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # a page that is written would be copied; none is, and torch takes no memory that must not be written
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            if isinstance(error, OSError) and error.errno == ENOMEM:  # the system maps no more than it has
                raise NoMemory(
                    f"model '{path}' has {path.stat().st_size / 1e9:.1f} GB, more than this machine's memory: take "
                    "a smaller model or one of fewer bits"
                ) from None
            raise ModelError(f"model '{path}' cannot be read: {error}") from None
        try:
            self.fields, self.entries, self.alignment, self.begin = _read(self._bytes)
        except Damaged as error:
            raise ModelError(f"model '{path}' is no whole GGUF file: {error}") from None

    def bytes_of(self, entry: Entry, size: int) -> Tensor:
        """A tensor's first bytes, uint8, in the mapped file: not to be written to. There are some.

        Raises:
            ModelError: the file ends before.
        """
        self.check_end(entry, size)
        return torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=entry.start)

    def check_end(self, entry: Entry, size: int) -> None:
        """A tensor of so many bytes ends within the file.

        Raises:
            ModelError: it does not.
        """
        end = entry.start + size
        if end > len(self._bytes):
            raise ModelError(
                f"model '{self.path}' is cut short: its tensor '{entry.name}' ends at byte {end} of "
                f"{len(self._bytes)}; fetch the file again"
            )

    def leave(self, entry: Entry) -> None:
        """Let the pages of a tensor leave this process's memory; a later access reads them from the file again."""
        page = mmap.PAGESIZE
        later = (each.start for each in self.entries.values() if each.start > entry.start)
        begin, end = -(-entry.start // page) * page, min(later, default=len(self._bytes)) // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def anything_from(self, begin: int) -> bool:
        """Whether a byte from there on is not zero."""
        if begin >= len(self._bytes):
            return False
        return bool(torch.frombuffer(self._bytes, dtype=torch.uint8, offset=begin).any())


def _read(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, Entry], int, int]:
    reader = _Reader(data)
    if data[:4] != MAGIC:
        raise Damaged("it does not begin with 'GGUF'")
    reader.position = 4
    version = reader.number("I")
    if version not in _VERSIONS:
        kind = "written for big-endian machines" if version & 0xFFFF == 0 else f"of version {version}"
        raise Damaged(f"it is {kind}; versions 2 and 3 are read")
    num_tensors, num_fields = reader.number("Q"), reader.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = reader.string()
        if name in fields:
            raise Damaged(f"it holds two fields of one name, {name!r:.60}")
        fields[name] = reader.value(reader.number("I"), name)
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise Damaged(f"its alignment is {alignment}")
    found = [reader.entry() for _ in range(num_tensors)]
    begin = -(-reader.position // alignment) * alignment
    entries = {name: Entry(name, shape, kind, begin + offset) for name, shape, kind, offset in found}
    if len(entries) < len(found):
        names = [name for name, *_ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise Damaged(f"it holds two tensors of one name, {twice!r:.60}")
    return fields, entries, alignment, begin


class _Reader:
    """A place in the file that moves forward, never beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize("<" + kind) * count
        start = self._pass(size)
        return struct.unpack_from(f"<{count}{kind}", self.data, start)

    def string(self) -> str:
        size = self.number("Q")
        start = self._pass(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise Damaged(f"the text at byte {start} is not UTF-8") from None

    def _strings(self, count: int) -> list[str]:
        """So many texts; vocabularies and merges have hundreds of thousands, so a call for each would take a second."""
        data, length, position, found = self.data, struct.Struct("<Q").unpack_from, self.position, []
        start = position
        try:
            for _ in range(count):
                start = position + 8
                position = start + length(data, position)[0]
                text = data[start:position]
                if len(text) < position - start:
                    raise self._ends()
                found.append(text.decode("utf-8"))
        except struct.error:
            raise self._ends() from None
        except UnicodeDecodeError:
            raise Damaged(f"the text at byte {start} is not UTF-8") from None
        self.position = position
        return found

    def value(self, kind: int, name: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise Damaged(f"its field {name!r:.60} is of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner not in _NUMBERS and inner != _STRING:
            raise Damaged(f"its field {name!r:.60} is a list of the unknown type {inner}")
        least = 8 if inner == _STRING else struct.calcsize(_NUMBERS[inner])  # a text begins with its length
        if count > _MOST_ITEMS or least * count > len(self.data) - self.position:
            raise Damaged(f"its field {name!r:.60} has {count} entries, more than fit into the file")
        if inner in _NUMBERS:
            return list(self.numbers(_NUMBERS[inner], count))
        return self._strings(count)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise Damaged(f"its tensor {name!r:.60} has {num_dimensions} dimensions")
        shape = self.numbers("Q", num_dimensions)[::-1]
        if 0 in shape:
            raise Damaged(f"its tensor {name!r:.60} has the shape {list(shape)}")
        kind, offset = self.numbers("I", 1)[0], self.number("Q")
        return name, tuple(shape), kind, offset

    def _pass(self, size: int) -> int:
        start = self.position
        if size > len(self.data) - start:
            raise self._ends()
        self.position = start + size
        return start

    def _ends(self) -> Damaged:
        return Damaged(f"it ends at byte {len(self.data)}, in the middle of its header")


def text_field(fields: Mapping[str, Any], name: str) -> str | None:
    """A field that is text; None if it is absent or something else."""
    found = fields.get(name)
    return found if isinstance(found, str) else None
