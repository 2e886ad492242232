"""Making and extending a datastore: token documents in, sorted segments out, one segment in memory at a time.

Sorting a segment takes about 16 bytes a token at its peak (2-byte tokens), so a segment of ``SEGMENT_TOKENS`` needs
0.6 GB whatever the size of the corpus. An append writes a new segment; small neighbours of like size are sorted
together, so there are never many.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.core.errors import ConfigError, ForetokenError, InputError
from foretoken.drafting.datastore.layout import MANIFEST, SUFFIX_BYTES, Manifest, Segment, read_manifest, write_manifest
from foretoken.models.fingerprint import digest_of

SEGMENT_TOKENS = 1 << 25
_AT_ONCE = 1 << 20  # suffixes
_LIKE_SIZE = 2  # a segment at most so many times as large as the one after it is sorted again with it

Report = Callable[[int, int], None]
"""Called with the documents and tokens so far."""


def build(
    documents: Iterable[Sequence[int]],
    out: Path,
    manifest: Manifest,
    *,
    entry: dict[str, Any] | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    report: Report = lambda documents, tokens: None,
) -> Manifest:
    """Make a datastore; its folder appears when it is whole.

    Args:
        documents: ids of each document, below ``manifest.vocab_size``; empty ones are left out.
        out: the folder to make; it may exist if it is empty.
        manifest: describes the tokens; without segments.
        entry: of the history.
        segment_tokens: tokens of one segment at most, which bounds the memory; a longer document is cut.
    Raises:
        ConfigError: ``out`` is something else already.
        InputError: there is no document with a token in it, or an id is not of the vocabulary.
        ForetokenError: the disk is full, or cannot be written to.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if (out / MANIFEST).exists():
            raise ConfigError(f"--out {out}: is a datastore already: extend it with append, or name another folder")
        raise ConfigError(f"--out {out}: something else is there; name a folder that is new or empty")
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
        try:
            made = _extended(unfinished, replace(manifest, segments=(), history=()), documents, segment_tokens, report)
            made = replace(made, history=(entry,) if entry else ())
            write_manifest(unfinished, made)
            unfinished.chmod(0o777 & ~_umask())
            os.replace(unfinished, out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return made


def append(
    documents: Iterable[Sequence[int]],
    folder: Path,
    *,
    entry: dict[str, Any] | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    report: Report = lambda documents, tokens: None,
) -> Manifest:
    """Add documents to a datastore. An open reader sees the old content until it opens the datastore again.

    Raises:
        InputError: see :func:`build`; or there is no datastore, or it is damaged.
        ForetokenError: another append is under way, or the disk is full.
    """
    read_manifest(folder)
    with _alone(folder), _writing(folder):
        before = read_manifest(folder)
        _remove_unlisted(folder, before)  # of an append that was killed
        try:
            made = _extended(folder, before, documents, segment_tokens, report)
        except BaseException:
            _remove_unlisted(folder, before)
            raise
        made = replace(made, history=(*before.history, *([entry] if entry else [])))
        write_manifest(folder, made)
        _remove_unlisted(folder, made)
    return made


def _extended(
    folder: Path, manifest: Manifest, documents: Iterable[Sequence[int]], segment_tokens: int, report: Report
) -> Manifest:
    """The manifest with segments of these documents after its own; nothing that it lists is touched."""
    stream = _Stream(manifest)
    segments = list(manifest.segments)
    number = max((int(segment.name.rpartition("-")[2]) for segment in segments), default=0)
    seen = count = 0

    def finish() -> None:
        nonlocal number
        number += 1
        segments.append(_written(folder, manifest, f"segment-{number:06d}", stream.taken(), stream.documents))

    for document in documents:
        # a separator after each document, and one before the first of a segment
        for begin in range(0, len(document), max(segment_tokens - 2, 1)):
            piece = document[begin : begin + segment_tokens - 2]
            if stream.length + len(piece) + 1 > segment_tokens and stream.documents:
                finish()
                stream = _Stream(manifest)
            stream.add(piece)
            seen, count = seen + 1, count + len(piece)
        report(seen, count)
    if not count:
        raise InputError("the corpus is empty: it holds no document with a token in it")
    finish()
    while len(segments) > 1:
        older, newer = segments[-2:]
        if older.tokens > _LIKE_SIZE * newer.tokens or older.tokens + newer.tokens > segment_tokens:
            break
        pieces = [_read_tokens(folder, manifest, each) for each in (newer, older)]  # backwards
        joined = np.concatenate(pieces, dtype=pieces[0].dtype)  # else in the byte order of the machine
        number += 1
        name = f"segment-{number:06d}"
        segments[-2:] = [_written(folder, manifest, name, joined, older.documents + newer.documents)]
    return replace(manifest, segments=tuple(segments))


class _Stream:
    """Documents of one segment on their way to disk."""

    def __init__(self, manifest: Manifest) -> None:
        self._vocab_size = manifest.vocab_size
        self._dtype = np.dtype(f">u{manifest.token_bytes}")
        self._separator = np.array([manifest.vocab_size], dtype=self._dtype)
        self._pieces = [self._separator]
        self.length, self.documents = 1, 0

    def add(self, tokens: Sequence[int]) -> None:
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InputError(f"a document holds the id {int(ids.max())}: the vocabulary has {self._vocab_size} entries")
        self._pieces += [ids.astype(self._dtype), self._separator]
        self.length += len(ids) + 1
        self.documents += 1

    def taken(self) -> np.ndarray:
        """All of it, backwards; nothing is left."""
        backwards: np.ndarray = np.empty(self.length, dtype=self._dtype)
        end = self.length
        for piece in self._pieces:
            backwards[end - len(piece) : end] = piece[::-1]
            end -= len(piece)
        self._pieces = []
        return backwards


def _written(folder: Path, manifest: Manifest, name: str, backwards: np.ndarray, documents: int) -> Segment:
    """Sort a segment and write its files under names that no reader uses yet."""
    paths = Segment(name, 0, 0, ("", "")).paths(folder)
    backwards.tofile(paths[0])
    suffixes_of(backwards).tofile(paths[1])
    for path in paths:
        _synced(path)
    return Segment(name, len(backwards), documents, (digest_of(paths[0]), digest_of(paths[1])))


def suffixes_of(tokens: np.ndarray) -> np.ndarray:
    """The order of all suffixes of big-endian tokens, little-endian uint32 [len(tokens)].

    The bytes are sorted, and of their suffixes those are kept that begin where a token does.

    Raises:
        ConfigError: the package that sorts is not installed.
    """
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            "datastores are sorted by the package pydivsufsort: pip install 'foretoken[retrieval]'"
        ) from None
    width = tokens.dtype.itemsize
    order = divsufsort(tokens.view(np.uint8))
    suffixes: np.ndarray = np.empty(len(tokens), dtype=f"<u{SUFFIX_BYTES}")
    kept = 0
    for begin in range(0, len(order), _AT_ONCE):  # the whole of it in one expression would take three times the memory
        some = order[begin : begin + _AT_ONCE]
        some = some[some % width == 0] // width
        suffixes[kept : kept + len(some)] = some
        kept += len(some)
    return suffixes


def _read_tokens(folder: Path, manifest: Manifest, segment: Segment) -> np.ndarray:
    return np.fromfile(segment.paths(folder)[0], dtype=f">u{manifest.token_bytes}")


def _remove_unlisted(folder: Path, manifest: Manifest) -> None:
    listed = {path for segment in manifest.segments for path in segment.paths(folder)}
    for path in folder.glob("segment-*"):
        if path not in listed:
            path.unlink(missing_ok=True)


def _synced(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written, as one line."""
    try:
        yield
    except OSError as error:
        raise ForetokenError(f"{place}: cannot be written ({error.strerror or error}); nothing was changed") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While inside, no other process appends; one that ends gives the lock back."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ForetokenError(f"{folder}: another append is under way; try again when it is done") from None
    finally:
        os.close(descriptor)
