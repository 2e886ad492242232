"""Checkpoints that are whole or not there: written next to their place, then renamed; the last complete one counts.

A checkpoint is a folder ``step-N`` with the float32 weights, the optimiser's state and one JSON file. A run that is
killed at any moment, or that fills the disk, leaves the previous checkpoint as it was.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.errors import ForetokenError

_PREFIX = "step-"
_PART = ".part"


def save(
    folder: Path, step: int, weights: dict[str, Tensor], optimiser: dict[str, Tensor], state: dict[str, Any]
) -> Path:
    """Write checkpoint ``step`` and remove the ones before it; one of this step that stands already is kept as it is.

    Raises:
        ForetokenError: it cannot be written (a full disk, say); the ones before it are still there.
    """
    place = folder / f"{_PREFIX}{step:08d}"
    part = place.with_suffix(_PART)
    if place.exists():  # to replace it there would have to be a moment without it
        return place
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, part / "weights.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in optimiser.items()}, part / "optimiser.safetensors")
        (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
        for path in (*part.iterdir(), part):
            _flush(path)
        os.replace(part, place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ForetokenError(_explain(folder, error)) from None
    for old in _standing(folder)[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint of a run; None if there is none."""
    standing = _standing(folder)
    return standing[-1] if standing else None


def load(place: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, optimiser state and JSON state of a checkpoint."""
    try:
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        return load_file(place / "weights.safetensors"), load_file(place / "optimiser.safetensors"), state
    except (OSError, SafetensorError, ValueError) as error:
        raise ForetokenError(f"{place}: damaged checkpoint ({error}); remove it to go on from the start") from None


def _standing(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.suffix != _PART)


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's entries, before anything is renamed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explain(folder: Path, error: Exception) -> str:
    last = latest(folder)
    kept = f"the last checkpoint, {last.name}, is kept" if last else "no earlier checkpoint exists"
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    why = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
    return f"{folder}: a checkpoint cannot be written ({why}); {kept}; free space and run the same command to go on"
