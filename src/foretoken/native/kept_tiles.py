"""Packed weights that are kept in the cache folder, so that a large checkpoint is rounded once and mapped afterwards.

A file holds the weights of one checkpoint, rounded in one way by one build of the native code:

    tiles of a weight, from a whole page on   |   ...   |   index, JSON   |   length of the index, and its SHA-256

Its name says which; the index repeats it. A file is written under another name and then renamed, so it is whole or not
there; a file that is found is checked against its index and its size. ``FORETOKEN_KEPT_GB`` bounds all such files
together: those that were used longest ago leave first, and 0 keeps none.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import torch

from foretoken.core.errors import ConfigError
from foretoken.core.files import make_way, own_cache_folder, private_file
from foretoken.core.phases import PHASES
from foretoken.native.quantised import CodedTiles

log = logging.getLogger(__name__)

T = TypeVar("T")

_WORTH = 2.0  # seconds of packing
_DEFAULT_GB = 8.0
_PAGE = 4096
_FOOT = 8 + 32
_FORM = ("inputs", "bits", "group", "minimum", "offset", "name")

_CURRENT: "ContextVar[KeptTiles | None]" = ContextVar("kept_tiles", default=None)


class KeptTiles:
    """The kept weights of one checkpoint, or the place for them.

    Args:
        folder: of all such files; None: there is none that only this user can write to.
        key: says which checkpoint, which rounding and which build.
        most: bytes of all files together.
    """

    def __init__(self, folder: Path | None, key: str, most: float) -> None:
        self._folder, self._key, self._most = folder, key, most
        self._made: list[tuple[str, CodedTiles]] = []
        self._seconds = 0.0
        self._index: dict[str, dict[str, int | str]] = {}
        if folder is None:
            return
        self._path = folder / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
        try:
            index, size = _index_of(self._path, key)
            self._bytes = torch.from_file(str(self._path), size=size, dtype=torch.uint8)
            self._index = index
            os.utime(self._path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the packed weights in %s are not used, and made again: %s", self._path, error)

    @contextmanager
    def used(self) -> Iterator[None]:
        """While inside, packing takes the kept weights, and those that it makes are remembered for :meth:`write`."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def find(self, name: str) -> CodedTiles | None:
        """A weight of this name."""
        entry = self._index.get(name)
        if entry is None:
            return None
        tiles, row, begin = (int(entry[key]) for key in ("tiles", "bytes", "begin"))
        data = self._bytes[begin : begin + tiles * row].view(tiles, row)
        kind = torch.float16 if entry["half"] else torch.float32
        return CodedTiles(data, kind=kind, **{key: entry[key] for key in _FORM})  # type: ignore[arg-type]

    def add(self, name: str, tiles: CodedTiles, seconds: float) -> None:
        """Remember a weight that took so long to pack."""
        self._made.append((name, tiles))
        self._seconds += seconds

    def write(self) -> None:
        """Keep the weights that were made, if that took long and they fit; a failure is one line in the log."""
        made, self._made = self._made, []
        size = sum(tiles.data.numel() for _, tiles in made)
        if self._seconds < _WORTH or self._index or size > self._most:
            return
        folder = self._folder
        if folder is None:
            log.warning("the packed weights are not kept: there is no cache folder that only this user can write to")
            return
        PHASES.info("keeping packed weights: %s, %.1f GB (FORETOKEN_KEPT_GB=0 keeps none)", self._path, size / 1e9)
        try:
            for left in folder.glob(".packed-*"):  # of a process that was stopped
                if time.time() - left.stat().st_mtime > 3600:
                    left.unlink()
            make_way(folder, "packed-*", size, self._most)
            with private_file(self._path) as file:
                index = {}
                for name, tiles in made:
                    file.seek(-file.tell() % _PAGE, os.SEEK_CUR)
                    form = {key: getattr(tiles, key) for key in _FORM}
                    place = {"begin": file.tell(), "tiles": len(tiles), "bytes": tiles.data.shape[1]}
                    index[name] = {**form, **place, "half": tiles.kind == torch.float16}
                    file.write(tiles.data.numpy().data.cast("B"))
                encoded = json.dumps({"key": self._key, "weights": index}).encode()
                file.write(encoded + len(encoded).to_bytes(8, "little") + hashlib.sha256(encoded).digest())
        except OSError as error:
            log.warning("the packed weights are not kept in %s: %s", folder, error.strerror or error)


def most_kept() -> float:
    """Bytes that packed weights may take on disk; 0: nothing is kept between runs.

    Raises:
        ConfigError: ``FORETOKEN_KEPT_GB`` is no number.
    """
    given = os.environ.get("FORETOKEN_KEPT_GB", "")
    try:
        return float(given or _DEFAULT_GB) * 1e9
    except ValueError:
        raise ConfigError(f"FORETOKEN_KEPT_GB={given!r:.60}: give the GB that packed weights may take, or 0") from None


def kept_tiles(key: str) -> KeptTiles | None:
    """The kept weights of this key; None where none are to be kept."""
    most = most_kept()
    return KeptTiles(own_cache_folder(), key, most) if most > 0 else None


def kept_or_made(names: Sequence[str], make: Callable[[], T]) -> T | CodedTiles:
    """The kept weights of these names, packed as one; else what ``make`` gives, remembered if it is one weight."""
    kept, name = _CURRENT.get(), " ".join(names)
    if kept is None:
        return make()
    found = kept.find(name)
    if found is None:
        begin = time.perf_counter()
        made = make()
        if isinstance(made, CodedTiles):
            kept.add(name, made, time.perf_counter() - begin)
        return made
    return found


def _index_of(path: Path, key: str) -> tuple[dict[str, dict[str, int | str]], int]:
    """What a file says that it holds, and its size.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not whole, or another's.
    """
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.getuid():
            raise ValueError("it belongs to another user")
        file.seek(max(facts.st_size - _FOOT, 0))
        foot = file.read()
        length = int.from_bytes(foot[:8], "little")
        if len(foot) < _FOOT or length > facts.st_size - _FOOT:
            raise ValueError("it is cut short")
        file.seek(facts.st_size - _FOOT - length)
        encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != foot[8:]:
        raise ValueError("it is cut short, or damaged")
    index = json.loads(encoded)
    if index["key"] != key:
        raise ValueError("it is of another checkpoint, build or processor")
    weights = index["weights"]
    if any(each["begin"] + each["tiles"] * each["bytes"] > facts.st_size - _FOOT - length for each in weights.values()):
        raise ValueError("it is cut short")
    return weights, facts.st_size
