"""Whether a model's weights fit into memory: refused before any is read, because the system would end the process."""

import sys
from pathlib import Path
from typing import Any

from foretoken.core.errors import NoMemory

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # of a container; version 2
_MOST_SEATS = 32
_EXPECTED_LENGTH = 8192  # tokens of a request, of those models that read more


def check_fits(name: str, needed: int) -> None:
    """Refuse a model that takes more memory than there is.

    Args:
        name: the user's name for it.
        needed: bytes that its weights take at least, once they are loaded.
    Raises:
        NoMemory: there are fewer.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise NoMemory(
            f"model '{name}' takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: end other "
            "programs, or take a smaller model or one of fewer bits (for a folder --dtype int4 or int8)"
        )


def free_memory() -> int | None:
    """Bytes that this process may still take; None where the system does not say."""
    found = [each for each in (_of_system(), _of_group()) if each is not None]
    return min(found, default=None)


def seats(bytes_of_token: int, max_length: int) -> int:
    """Requests that may run at once: 32, or as many as half of the free memory holds.

    Args:
        bytes_of_token: of keys and values.
        max_length: tokens of a request at most; of 8,192 and more, 8,192 are expected.
    """
    free = free_memory()
    if free is None:
        return _MOST_SEATS
    return max(1, min(_MOST_SEATS, free // 2 // max(1, bytes_of_token * min(max_length, _EXPECTED_LENGTH))))


def bytes_of_token(config: Any, bytes_of_value: int = 2) -> int:
    """Bytes of the keys and values of one token.

    Args:
        config: of transformers.
        bytes_of_value: of the dtype that they are kept in.
    """
    text = config.get_text_config(decoder=True)
    values = 0
    for layer in range(text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)):  # others keep none
        own = text.per_layer_config[layer]
        heads = getattr(own, "num_attention_heads", None) or 1
        shared = getattr(own, "num_key_value_heads", None) or heads
        values += shared * (getattr(own, "head_dim", None) or own.hidden_size // heads)
    return int(2 * bytes_of_value * values)


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


def peak_resident_bytes() -> int | None:
    """Return the process's peak memory in RAM; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
