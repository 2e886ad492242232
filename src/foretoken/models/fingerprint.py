"""A checkpoint's fingerprint: a part trained for one target must not be used with another.

The fingerprint is the SHA-256 over

1. the config, as JSON with sorted keys, without where it was loaded from and which version of the library wrote it;
2. for each weight file that the library would load, in order of name: its name, its size, and ``PIECES`` pieces of
   ``PIECE`` bytes spread evenly from its first byte to its last (the whole file where that is less).

So it takes a moment for a model of any size, and a file saved again with the same content keeps it. A change of the
weights is seen if it touches a piece: training any layer does, editing a handful of bytes may not. It distinguishes
models; it does not protect against forgery. The tokenizer is not part of it. A LoRA folder's fingerprint begins with
the whole of its own files and goes on with the base model's. Of a GGUF file, which holds everything, only (2) is
used, without its name; of one in pieces, all of them are read.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretoken.core.errors import ModelError
from foretoken.models.gguf.magic import paths_of

PIECES = 64
PIECE = 1 << 16  # bytes

_PASSING = ("_name_or_path", "transformers_version")  # fields of a config that say nothing about the model
_LORA = "adapter_config.json"
_OF_AUTO_GPTQ = "gptq_model-*.safetensors"
_LAYOUTS = (  # in the order in which the library looks for weights
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def fingerprint(folder: Path) -> str:
    """The fingerprint of a Hugging Face folder or a GGUF file, as 64 hexadecimal digits.

    Raises:
        ModelError: the folder has no config or no weights, or they cannot be read.
    """
    digest = hashlib.sha256()
    try:
        if folder.is_file():
            for path in paths_of(folder):
                digest.update(f"{path.stat().st_size}\n".encode())
                _sample(path, digest)
            return digest.hexdigest()
        if (folder / _LORA).is_file():
            for path in (folder / _LORA, *sorted(folder.glob("adapter_model.*"))):
                digest.update(path.read_bytes())
            if not (folder / "config.json").is_file():
                folder = folder_of(json.loads((folder / _LORA).read_bytes())["base_model_name_or_path"])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        digest.update(_canonical(config))
        for path in _weight_files(folder):
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            _sample(path, digest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: no fingerprint can be taken: {error}") from None
    return digest.hexdigest()


def state_of_weights(source: str) -> str:
    """A text that changes with every change of a loaded folder's weights, even of a few bytes."""
    folder = folder_of(source).resolve()
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _weight_files(folder)]
    return f"{folder} {fingerprint(folder)} {facts} {version('transformers')}"


def fingerprint_of(source: str) -> str:
    """The fingerprint of a checkpoint that has been loaded: a folder, a file, or a hub id of which there is a copy."""
    return fingerprint(folder_of(source))


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """Fingerprint of a tokenizer's vocabulary: equal for all models with the same tokens and ids."""
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def folder_of(source: str) -> Path:
    """Where the files of a checkpoint that has been loaded are: its folder, its one file, or the hub's local copy."""
    from transformers.utils import cached_file

    if Path(source).exists():
        return Path(source)
    found = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
    return Path(found or cached_file(source, _LORA)).parent


def _canonical(config: dict[str, Any]) -> bytes:
    return json.dumps({key: config[key] for key in config if key not in _PASSING}, sort_keys=True).encode()


def _weight_files(folder: Path) -> list[Path]:
    for single, index in _LAYOUTS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            placed = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
            return [folder / name for name in sorted(set(placed.values()))]
    if own := sorted(folder.glob(_OF_AUTO_GPTQ)):
        return own
    raise ModelError(f"{folder}: has no weights ({' or '.join(single for single, _ in _LAYOUTS)})")


def _sample(path: Path, digest: Any) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= PIECES * PIECE:
            digest.update(file.read())
            return
        for number in range(PIECES):
            file.seek((size - PIECE) * number // (PIECES - 1))
            digest.update(file.read(PIECE))


def digest_of(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
