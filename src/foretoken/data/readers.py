"""Streaming readers of JSON Lines and plain text files, compressed or not.

Files may be larger than the memory. An invalid record raises an error with the file, the line and the field; it is
never skipped silently.
"""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from foretoken.core.errors import InputError

PARAGRAPHS = 1 << 16  # characters of a plain text file in one record

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, through its compression if its name ends in ``.gz`` or ``.xz``.

    Raises:
        InputError: missing, a folder, unreadable, or damaged (also while it is being read).
    """
    opener = _OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: this is a folder, not a file") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise InputError(f"{path}: damaged compressed file ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def is_json_lines(path: Path) -> bool:
    """Return whether a file has JSON records, by its name: ``.jsonl`` or ``.json`` before any ``.gz`` or ``.xz``."""
    name = path.name.removesuffix(path.suffix) if path.suffix in _OPENERS else path.name
    return name.endswith((".jsonl", ".json"))


def read_placed_records(path: Path, *, strict: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file in order, each with its place ``FILE:LINE`` for messages.

    Args:
        path: ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.xz``.
        strict: refuse a record that has a key twice; it takes longer to read.
    Raises:
        InputError: the file or one of its lines is invalid; the message has the line.
    """
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: not UTF-8 text (byte {error.start + 1} of the line)") from None
            if text:
                yield place, _parse(text, place, _once if strict else None)


def read_paragraphs(path: Path) -> Iterator[str]:
    """Yield a plain text file in pieces of about ``PARAGRAPHS`` characters that end at a line end.

    Longer lines are cut, so that even a file without line ends is streamed.
    """
    with open_bytes(path) as file:
        reader = io.TextIOWrapper(file, encoding="utf-8-sig")
        try:
            while piece := reader.read(PARAGRAPHS):
                yield piece + reader.readline(PARAGRAPHS)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from None


def json_type(value: object) -> str:
    """Return JSON's word for the type of a parsed value, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class _Twice(Exception):
    """A repeated key of an object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; the library would silently keep the last of several values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found


def _parse(line: str, place: str, hook: Callable[..., Any] | None) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=hook)
    except _Twice as twice:
        raise InputError(f"{place}: has '{twice}' twice: keep one") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
    except (RecursionError, ValueError):  # nesting or an integer beyond the parser's limits
        raise InputError(f"{place}: not valid JSON (nested too deeply, or a number too long)") from None
    if not isinstance(record, dict):
        raise InputError(f"{place}: expected a JSON object, found {json_type(record)}")
    return record
