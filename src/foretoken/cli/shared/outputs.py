"""Output files: checked before the work, written atomically after it."""

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
    """Return a benchmark's arguments with ``--json FILE`` replaced by ``--out FILE``.

    ``--json`` alone prints to stdout, as in all commands; the parser does not support options with an optional value.

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
    """Check before a long computation that its results can be written.

    Args:
        files: the path of each option, if it has one.
    Raises:
        ConfigError: a path is not writable, or two options name the same path.
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
    """Refuse an option that needs matplotlib if it is not installed.

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
    """Write a record as JSON, with null for non-finite numbers, and report the file."""
    write_text(path, json.dumps(finite(record), indent=1) + "\n")


def write_text(path: Path, content: str | bytes) -> None:
    """Replace a file atomically, at the target of a link, and report it."""
    write_whole(path.resolve(), content)
    note(f"wrote {path}")
