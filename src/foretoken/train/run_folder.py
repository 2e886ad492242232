"""The folder of a run: which run it belongs to, its record, and a disk that cannot be written.

OUT/config.json, model.safetensors, ..    the result
OUT/training.json                         the record
OUT/run/claim.json                        the settings that a resumed run must share
OUT/run/..                                text, tokens and checkpoints
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write_whole
from foretoken.train import checkpoint

RECORD = "training.json"
FORMAT = 1  # of a run's folder


def write_record(out: Path, record: dict[str, Any]) -> None:
    """Write ``training.json``."""
    write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")


def add_to_record(out: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Add measurements after a run to its ``training.json``, and return all of it."""
    record: dict[str, Any] = {**json.loads((out / RECORD).read_text(encoding="utf-8")), **found}
    write_record(out, record)
    return record


def first_line(error: Exception) -> str:
    """Return the message of a library's error without the advice that follows it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def disk_trouble(out: Path) -> Iterator[None]:
    """Turn a full disk, or a folder that cannot be written, into one line that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ForetokenError(
            f"{out}: cannot be written ({why}); the last checkpoint is kept; free space and run the same command again"
        ) from None


def refuse_another(work: Path, claim: dict[str, Any]) -> None:
    """Refuse to go on in the folder of another run; one that has saved no step yet gives way."""
    path = work / "claim.json"
    claim = {"format": FORMAT, **claim}
    if not path.exists() or (found := {"format": 1, **json.loads(path.read_text(encoding="utf-8"))}) == claim:
        return
    if not any(checkpoint.latest(place) for place in work.rglob("checkpoints")):  # of some stage
        shutil.rmtree(work)
        return
    changed = ", ".join(key for key in claim if found.get(key) != claim[key])
    raise ForetokenError(f"{work}: holds a run with another {changed}; name another --out, or remove that folder")


def write_claim(work: Path, claim: dict[str, Any]) -> None:
    """Write which run the folder belongs to."""
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / "claim.json", json.dumps({"format": FORMAT, **claim}))
