"""The training text as a deterministic stream of token blocks: sources in given shares, tokenised once, kept on disk.

Every source has a file of uint16 or uint32 tokens that grows as the training asks for more, so that neither a corpus
nor its tokens are ever whole in memory (one document and one block at a time), and a source without a share is never
read. Which source a block is cut from depends on (seed, block number) alone, and where it is cut on how many
blocks that source has given: a resumed run reads exactly what the interrupted one would have read.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import write_whole
from foretoken.models.fingerprint import digest_of

HELD_OUT = 100  # one document in so many is kept for the held-out loss
GROW_CHARACTERS = 1 << 18  # text that is tokenised at a time
GROW_HELD_OUT = 1 << 13  # the same of held-out text: a hundred times as much is read for it
GROW_WRITTEN = 1 << 14  # the same of text that a model has to write first: little of it ahead of its use
TOKEN_FILE_LIMIT = 1 << 27  # tokens of one source on disk (0.25 GB); the rest is not used


@dataclass(frozen=True)
class Source:
    """Documents of one kind and their share of the mixture.

    Attributes:
        name: unique in the mixture; names the token file.
        share: weight of this source; the mixture divides by the sum.
        documents: gives an iterator over the documents, the same each time.
        files: its files, for the record; empty for generated text.
        kept: the documents that exist already, where a model writes more of them while it is read: none are written
            for the held-out loss.
    """

    name: str
    share: float
    documents: Callable[[], Iterator[str]]
    files: tuple[Path, ...] = ()
    kept: Callable[[], Iterator[str]] | None = None


def scaled(sources: Sequence[Source], share: float) -> list[Source]:
    """Return the sources with shares that add up to ``share``; none for 0."""
    total = sum(source.share for source in sources)
    return [replace(source, share=source.share / total * share) for source in sources if share > 0]


Encode = Callable[[list[str]], list[list[int]]]


class TokenStream:
    """The tokens of one source as an endless sequence, tokenised as far as it has been read.

    Args:
        source: its documents.
        encode: texts to ids, without adding special tokens.
        folder: where ``NAME.tokens`` and ``NAME.json`` live.
        held_out: take the documents that are kept from training instead of the others.

    Attributes:
        length: tokens on disk.
        whole: whether the source was read to its end: further reading repeats it.
    """

    def __init__(self, source: Source, encode: Encode, folder: Path, dtype: type, held_out: bool = False) -> None:
        self._source, self._encode, self._held_out = source, encode, held_out
        self._read_documents = source.kept if held_out and source.kept else source.documents
        stem = f"{source.name}.heldout" if held_out else source.name
        self._tokens_path, self._index_path = folder / f"{stem}.tokens", folder / f"{stem}.json"
        self._dtype = np.dtype(dtype)
        self._documents, self.length, self.whole = 0, 0, False
        if self._index_path.exists():
            index = json.loads(self._index_path.read_text())
            self._documents, self.length, self.whole = index["documents"], index["tokens"], index["whole"]
        with self._tokens_path.open("ab") as file:
            if file.tell() < self.length * self._dtype.itemsize:  # lost with the machine's power: begin again
                self._documents, self.length, self.whole = 0, 0, False
            # tokens after the last index are written again
            file.truncate(self.length * self._dtype.itemsize)
        self._reader: Iterator[str] | None = None
        self._view: np.ndarray | None = None

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``start`` to ``start + count``, where ``start`` is a multiple of ``count``.

        After the last whole block of a source it begins again, with the same blocks, for a cache of their states. A
        source shorter than a block is repeated within it.
        """
        if self.is_empty():
            raise InputError(f"corpus '{self._source.name}' is empty: it holds no document to train on")
        while not self.whole and self.length < start + count:
            self._grow()
        if self._view is None or len(self._view) < self.length:
            self._view = np.memmap(self._tokens_path, dtype=self._dtype, mode="r")
        start %= max(self.length // count, 1) * count
        if start + count <= self.length:
            return np.asarray(self._view[start : start + count])
        return np.take(self._view, np.arange(start, start + count), mode="wrap")

    def is_empty(self) -> bool:
        """Whether there is no token at all; reads as far as the first."""
        while not self.whole and not self.length:
            self._grow()
        return not self.length

    def _grow(self) -> None:
        if self._reader is None:
            self._reader = self._read_documents()
            for _ in range(self._documents):
                next(self._reader, None)
        wanted = GROW_HELD_OUT if self._held_out else GROW_WRITTEN if self._source.kept else GROW_CHARACTERS
        batch: list[str] = []
        characters = 0
        for document in self._reader:
            self._documents += 1
            if is_held_out(document) == self._held_out:
                batch.append(document)
                characters += len(document)
            if characters >= wanted:
                break
        else:
            self.whole = True
        ids = [token for document in self._encode(batch) for token in document]
        with self._tokens_path.open("ab") as file:
            file.write(np.asarray(ids, dtype=self._dtype).tobytes())
        self.length += len(ids)
        self.whole = self.whole or self.length >= TOKEN_FILE_LIMIT
        write_whole(
            self._index_path, json.dumps({"documents": self._documents, "tokens": self.length, "whole": self.whole})
        )


def is_held_out(document: str) -> bool:
    """Whether a document is kept from training; depends on its text alone, so that a copy of it is kept, too."""
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


class Mixture:
    """Blocks of tokens from several sources, in their shares.

    Args:
        sources: at least one.
        encode: texts to ids.
        folder: for the token files.
        block: tokens of one block.
        vocabulary: ids are below this.
        seed: decides the order of the sources.
    Raises:
        ConfigError: two sources have the same name, which would write into the same token file.
    """

    def __init__(
        self, sources: Sequence[Source], encode: Encode, folder: Path, block: int, vocabulary: int, seed: int
    ) -> None:
        for name, count in Counter(source.name for source in sources).items():
            if count > 1:
                raise ConfigError(f"two sources are called '{name}': give one of the files another name")
        folder.mkdir(parents=True, exist_ok=True)
        dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
        self.sources = list(sources)
        self.block, self.seed = block, seed
        self._streams = [TokenStream(source, encode, folder, dtype) for source in sources]
        self._held_out = [TokenStream(source, encode, folder, dtype, held_out=True) for source in sources]
        self._shares = [source.share for source in sources]
        self._given = [0] * len(self.sources)
        self._number = 0

    def next(self, count: int) -> Tensor:
        """The next ``count`` blocks.

        Returns:
            int64 [count, block].
        """
        blocks: np.ndarray = np.empty((count, self.block), dtype=np.int64)
        for row in range(count):
            # string seeds are hashed with SHA-512: the same on every machine and version
            index = random.Random(f"{self.seed}/{self._number}").choices(range(len(self._shares)), self._shares)[0]
            blocks[row] = self._streams[index].read(self._given[index] * self.block, self.block)
            self._given[index] += 1
            self._number += 1
        return torch.from_numpy(blocks)

    def held_out(self, count: int) -> Tensor:
        """Blocks that training never reads, the sources in their shares; the same at every call.

        A source too small to have documents of its own here gives none.

        Returns:
            int64 [<= count, block].
        """
        total = sum(self._shares)
        blocks = []
        for stream, share in zip(self._held_out, self._shares, strict=True):
            if stream.is_empty():
                continue
            wanted = max(1, round(count * share / total))
            read = [stream.read(number * self.block, self.block) for number in range(wanted)]
            # a small source would be repeated: count each of its blocks once
            blocks += read[: max(1, stream.length // self.block)]
        if not blocks:
            return torch.empty(0, self.block, dtype=torch.int64)
        return torch.from_numpy(np.stack(blocks[:count]).astype(np.int64))

    def state(self) -> dict[str, Any]:
        """Where the stream stands, for a checkpoint."""
        return {"number": self._number, "given": dict(zip(self._names(), self._given, strict=True))}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._number = int(state["number"])
        self._given = [int(state["given"][name]) for name in self._names()]

    def report(self) -> list[dict[str, Any]]:
        """The tokens read from each source: for the record next to the weights."""
        total = sum(self._shares)
        return [
            {
                "name": source.name,
                "share": round(source.share / total, 4),
                "tokens": given * self.block,
                "passes": round(given * self.block / max(stream.length, 1), 2) if stream.whole else None,
                "files": [{"name": path.name, "sha256": digest_of(path)} for path in source.files],
            }
            for source, stream, given in zip(self.sources, self._streams, self._given, strict=True)
        ]

    def _names(self) -> list[str]:
        return [source.name for source in self.sources]
