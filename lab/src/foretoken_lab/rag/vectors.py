"""The passages' vectors, computed once and stored in a folder.

DIR/
  vectors.npy     float32 [N, D]
  index.json      fingerprints of passages and encoder; written last
  hnsw.faiss      the graph of ``hnsw``, if it was used
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from foretoken.core.errors import ConfigError, ForetokenError, InputError, MismatchError
from foretoken.core.files import write_whole
from foretoken_lab.rag.encoders import Encoder
from foretoken_lab.rag.passages import Passage, digest

_MANIFEST, _VECTORS, GRAPH = "index.json", "vectors.npy", "hnsw.faiss"

Report = Callable[[int], None]
"""Called with the number of passages so far."""


def vectors_of(
    passages: Sequence[Passage], encoder: Encoder, folder: Path | None, report: Report = lambda count: None
) -> np.ndarray:
    """Read the vectors, float32 [N, D], from a folder, or compute and store them.

    Args:
        folder: None: not stored.
    Raises:
        MismatchError: the folder has the vectors of other passages or of another encoder.
        InputError: its files are damaged.
        ConfigError: it is a file.
        ForetokenError: it is not writable.
    """
    facts = {"format": 1, "passages": digest(passages), "count": len(passages), "encoder": encoder.name}
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"--index {folder}: this is a file; name a new folder")
    if folder is not None and (folder / _MANIFEST).is_file():
        return _read(folder, facts)
    rows = []
    for number, passage in enumerate(passages, start=1):
        rows.append(encoder.encode(passage.text))
        report(number)
    vectors = np.stack(rows)
    if folder is not None:
        _write(folder, facts, vectors)
    return vectors


def _read(folder: Path, facts: dict[str, object]) -> np.ndarray:
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        vectors: np.ndarray = np.load(folder / _VECTORS, mmap_mode="r")
        shape, kind = vectors.shape, vectors.dtype
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"--index {folder}: damaged ({str(error).splitlines()[0][:120]}); remove it") from None
    for name, value in facts.items():
        if not isinstance(found, dict) or {"format": 1, **found}.get(name) != value:
            raise MismatchError(f"--index {folder}: made for other passages or another encoder ({name} differs)")
    if len(shape) != 2 or shape[0] != facts["count"] or kind != np.float32:
        raise InputError(f"--index {folder}: holds {shape} numbers for {facts['count']} passages; remove it")
    return np.ascontiguousarray(vectors)


def _write(folder: Path, facts: dict[str, object], vectors: np.ndarray) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{_VECTORS}"
        with unfinished.open("wb") as file:
            np.save(file, vectors)
        unfinished.replace(folder / _VECTORS)
        (folder / GRAPH).unlink(missing_ok=True)  # of the previous contents
    except OSError as error:
        raise ForetokenError(f"--index {folder}: cannot be written ({error.strerror or error})") from None
    write_whole(folder / _MANIFEST, json.dumps(facts, indent=1) + "\n")
