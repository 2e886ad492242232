"""Which paths name a GGUF file, in one piece or several; without torch, so that a command line can say so at once."""

import re
import struct
from pathlib import Path

MAGIC = b"GGUF"
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """By its ending or its first bytes; there may be no such file."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def architecture_named(path: Path) -> str:
    """Return a file's architecture, which stands near its beginning; empty if it does not."""
    key = b"general.architecture" + struct.pack("<I", 8)  # the number of texts
    with path.open("rb") as file:
        begin = file.read(1 << 16)
    place = begin.find(key) + len(key)
    if place < len(key) or place + 8 > len(begin):
        return ""
    (size,) = struct.unpack_from("<Q", begin, place)
    return begin[place + 8 : place + 8 + size].decode(errors="replace")


def paths_of(path: Path) -> list[Path]:
    """Every piece of a file by the names of split ones; the file alone if it is not named so."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    return [path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf") for number in range(1, count + 1)]
