"""Whether a model's weights fit into memory: refused before any is read, because the system would end the process."""

from __future__ import annotations

from pathlib import Path

from foretoken.core.errors import ModelError

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # of a container; version 2


def check_fits(name: str, needed: int) -> None:
    """Refuse a model that takes more memory than there is.

    Args:
        name: the user's name for it.
        needed: bytes that its weights take at least, once they are loaded.
    Raises:
        ModelError: there are fewer.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise ModelError(
            f"model '{name}' takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: end other "
            "programs, or take a smaller model or one of fewer bits (for a folder --dtype int4 or int8)"
        )


def free_memory() -> int | None:
    """Bytes that this process may still take; None where the system does not say."""
    found = [each for each in (_of_system(), _of_group()) if each is not None]
    return min(found, default=None)


def _of_system() -> int | None:
    try:
        lines = _SYSTEM.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _of_group() -> int | None:
    """Of a container's limit; pages of files in memory give way."""
    try:
        most = int((_GROUP / "memory.max").read_text(encoding="ascii"))
        taken = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return most - taken + int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):  # "max": there is no limit
        return None
