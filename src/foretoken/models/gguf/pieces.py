"""GGUF files in several pieces, NAME-00001-of-0000N.gguf: the first names the model, and all lie in one folder.

The first piece has the model's fields; each has its number, their count, and tensors of its own (llama-gguf-split).
"""

from pathlib import Path

from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.models.gguf.container import Entry, GGUFFile
from foretoken.models.gguf.magic import paths_of


def pieces_of(path: Path) -> list[GGUFFile]:
    """Open a file, and the other pieces of its model if it is the first of several.

    Raises:
        ModelError: one is damaged, is missing or belongs to another model, or the file is not the first piece.
    """
    first = GGUFFile(path)
    count = first.fields.get("split.count", 1)
    if type(count) is not int or count < 1:
        raise ModelError(f"model '{path}': its field 'split.count' is {count!r:.40}")
    if count == 1:
        return [first]
    paths = paths_of(path)
    if len(paths) != count:
        raise ModelError(
            f"model '{path}' is one of {count} pieces, which its name does not say: name them "
            f"NAME-00001-of-{count:05d}.gguf and so on, or put them together with llama-gguf-split --merge"
        )
    if path != paths[0]:
        raise ModelError(f"model '{path}' is not the first of its {count} pieces: name {paths[0]}")
    missing = [each for each in paths if not each.is_file()]
    if missing:
        raise ModelError(
            f"model '{path}': its piece {missing[0].name} is missing ({len(missing)} of {count} in all): "
            "fetch it into the same folder"
        )
    pieces = [first, *(GGUFFile(each) for each in paths[1:])]
    for number, piece in enumerate(pieces):
        if piece.fields.get("split.no") != number or piece.fields.get("split.count") != count:
            raise ModelError(f"model '{path}': {piece.path} is not its piece {number + 1} of {count}: fetch it again")
    return pieces


class SplitFile(GGUFFile):
    """All pieces of a model as one file.

    Args:
        pieces: of :func:`pieces_of`.
    Raises:
        ModelError: their tensors are not those of one model.
    """

    def __init__(self, pieces: list[GGUFFile]) -> None:
        first = pieces[0]
        self.path, self.fields = first.path, first.fields
        self.alignment, self.begin = first.alignment, first.begin
        self._piece_of = {name: piece for piece in pieces for name in piece.entries}
        self.entries = {name: piece.entries[name] for name, piece in self._piece_of.items()}
        total, written = sum(len(piece.entries) for piece in pieces), first.fields.get("split.tensors.count")
        if len(self.entries) != total or written not in (None, total):
            raise ModelError(
                f"model '{self.path}': its {len(pieces)} pieces hold {total} tensors with {len(self.entries)} names, "
                f"and {written} are expected: fetch them again"
            )

    def bytes_of(self, entry: Entry, size: int) -> Tensor:
        """See :meth:`GGUFFile.bytes_of`."""
        return self._piece_of[entry.name].bytes_of(entry, size)

    def leave(self, entry: Entry) -> None:
        """See :meth:`GGUFFile.leave`."""
        self._piece_of[entry.name].leave(entry)

    def check_end(self, entry: Entry, size: int) -> None:
        """See :meth:`GGUFFile.check_end`."""
        self._piece_of[entry.name].check_end(entry, size)
