"""Files: known to be readable and writable beforehand, and results written whole or not at all."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from foretoken.core.errors import ConfigError, ForetokenError, InputError

_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # bytes, on the usual file systems


def check_name(name: str, option: str) -> None:
    """Refuse a name that no file or model has: to look for it is an error of the system's, not an answer.

    Args:
        option: that it is given for, with its ``=``.

    Raises:
        ConfigError: the name, or a part of the path, is too long, is no valid Unicode, or has control characters,
            which a terminal would obey when a message prints them.
    """
    for each in name:
        if each < " " or each == "\x7f" or "\ud800" <= each <= "\udbff":
            raise ConfigError(f"{option}{name[:60]!r} has the character {each!r}: no file or model has such a name")
    parts = [len(part.encode("utf-8", "surrogatepass")) for part in name.split("/")]
    if max(parts) > _LONGEST_NAME or sum(parts) + len(parts) > _LONGEST_PATH:
        raise ConfigError(f"{option}{name[:60]!r}… is {len(name):,} characters long: no file or model has such a name")


def home_expanded(path: str | Path, option: str = "") -> Path:
    """The path with ``~`` or ``~user`` at its beginning replaced by that home folder.

    Args:
        option: that named it, with its ``=``; "": an argument.

    Raises:
        ConfigError: there is no such user, or the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigError(
            f"{option}{path!s:.200}: '{user:.60}' is no user's home folder here; write the whole path, or "
            f"./{user:.60} for a folder of that name"
        ) from None


def check_readable(path: str | Path, option: str = "") -> None:
    """Refuse what cannot be read as a file, before anything is loaded for it.

    Args:
        option: that named it; "": an argument.

    Raises:
        InputError: there is none, it is a folder, or not for this user.
    """
    name = f"{option} {path!s:.200}".lstrip()
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{name}: no such file") from None
    except OSError as error:  # a name that is too long, links in a circle
        raise InputError(f"{name}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a zero byte
        raise InputError(f"{name}: cannot be read ({error})") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{name}: this is a folder, name a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{name}: cannot be read (permission denied)")


def check_writable(path: str | Path, option: str) -> Path:
    """The path, if a file can be written there; nothing is left.

    Raises:
        ConfigError: the folder is missing, or not writable, or the path is a folder.
    """
    check_name(str(path), f"{option} ")
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{option} {path}: cannot write there")
        return path
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot write there ({error.strerror or error})") from None
    return path


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that could not be made, or not be written to; nothing is left.

    Raises:
        ConfigError: it is a file or lies below one, or its nearest folder is not writable.
    """
    check_name(str(folder), f"{option} ")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if there == folder and not there.is_dir():
        raise ConfigError(f"{option} {folder}: this is a file; name a folder to make")
    if not there.is_dir():
        raise ConfigError(f"{option} {folder}: {there} is a file; name a folder to make")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: cannot write there (Permission denied)")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file next to its place and move it there, so that no reader ever sees half of it.

    A pipe or a device (``/dev/null``) is written to: a file in its place would take it away from its other users.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_special(path):
            path.write_bytes(data)
            return
        with private_file(path) as file:
            file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)  # results need not be private
    except OSError as error:
        raise ForetokenError(f"{path}: cannot be written ({error.strerror or error})") from None


@contextmanager
def private_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that only this user can read: written next to its place, and moved there if nothing went wrong."""
    with ExitStack() as undo:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            undo.callback(Path(file.name).unlink, missing_ok=True)
            yield file
        os.replace(file.name, path)


def make_way(folder: Path, pattern: str, size: int, most: float) -> None:
    """Remove the files of a pattern that were used longest ago, until another one of ``size`` bytes fits."""
    files = sorted(((each.stat(), each) for each in folder.glob(pattern)), key=lambda entry: entry[0].st_mtime_ns)
    total = size + sum(facts.st_size for facts, _ in files)
    for facts, path in files:
        if total > most:
            path.unlink(missing_ok=True)
            total -= facts.st_size


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def own_cache_folder() -> Path | None:
    """The user's cache folder of ours, which other users cannot read; None where it cannot be had."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "foretoken"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            folder.chmod(0o700)
            if os.access(folder, os.W_OK):
                return folder
    except OSError:
        pass
    return None


def check_format(found: object, known: int) -> None:
    """Refuse the content of a file that another version of this program has written, in another form.

    Args:
        found: the format number in the file; files from before the numbers have format 1.
        known: the number that this version writes.
    Raises:
        ValueError: they differ; the message has the remedy.
    """
    if found != known:
        remedy = "update foretoken" if isinstance(found, int) and found > known else "make it again"
        raise ValueError(f"it has format {found!r:.20}, and this version reads format {known}: {remedy}")
