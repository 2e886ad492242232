"""Whether a path names a GGUF file; without torch, so that a command line can say so at once."""

from __future__ import annotations

from pathlib import Path

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """By its ending or its first bytes; there may be no such file."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
