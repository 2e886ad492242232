"""Files that a command writes: refused before the work, written whole after it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.cli.shared.console import finite, note
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_writable, write_whole

_MEASURE = (("bench",), ("analyze", "acceptance"), ("analyze", "tradeoff"))


def json_in_a_file(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command that measures, with ``--json FILE`` written as ``--out FILE``.

    ``--json`` alone prints, there as everywhere; options whose value may be left out are unknown to the parser.

    Args:
        arguments: everything after the program's name.
    """
    if not any(tuple(arguments[: len(command)]) == command for command in _MEASURE):
        return list(arguments)
    found = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        names_file = argument.startswith("--json=") or (argument == "--json" and not following.startswith("-"))
        found.append(argument.replace("--json", "--out", 1) if names_file else argument)
    return found


def check_outputs(files: Mapping[str, Path | None]) -> None:
    """Find out before an hour of work, not after, that results cannot be written.

    Args:
        files: what each option names, if anything.
    Raises:
        ConfigError: a place cannot be written to, or two options name the same.
    """
    taken: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        check_writable(path.resolve() if path.is_symlink() else path, option)
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(f"{other} and {option} both name {path}: choose two files")


def check_pictures(option: str) -> None:
    """Refuse an option that draws where nothing can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{option} needs matplotlib: pip install 'foretoken[report]', or leave {option} out"
        ) from None


def write_json(path: Path, record: Any) -> None:
    """Write a record, numbers that JSON lacks as null, and say so."""
    write_text(path, json.dumps(finite(record), indent=1) + "\n")


def write_text(path: Path, content: str | bytes) -> None:
    """Write a file whole, where a link leads to, and say so."""
    write_whole(path.resolve(), content)
    note(f"wrote {path}")
