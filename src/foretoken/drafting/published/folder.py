"""The files of a published drafter: its config and its tensors, in safetensors, a ``.bin`` of torch or a GGUF file."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ModelError
from foretoken.core.files import home_expanded
from foretoken.drafting.published.layouts import DFLASH, DRAFT_MODEL, EAGLE, recognise
from foretoken.models.gguf.magic import architecture_named, is_gguf

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WEIGHTS, BIN = "model.safetensors", "pytorch_model.bin"
_GGUF = {"eagle3": EAGLE, "dflash": DFLASH}  # methods of architectures
_REFUSED_GGUF = {"gemma4-assistant": "Gemma 4 assistant: it is not read from GGUF files: name its folder"}
INDEX = f"{WEIGHTS}.index.json"


def method_for(model: Any) -> str:
    """Return the method that drafts with a model that is named without one.

    Args:
        model: a folder or a GGUF file; every other name is that of a language model.
    Raises:
        ModelError: the folder's layout is unknown, or refused.
    """
    if not isinstance(model, str | Path):  # for the method to refuse
        return DRAFT_MODEL
    folder = home_expanded(model)
    try:
        if folder.is_file() and is_gguf(folder):
            kind = architecture_named(folder)
            if kind in _REFUSED_GGUF:
                raise ModelError(_REFUSED_GGUF[kind])
            return _GGUF.get(kind, DRAFT_MODEL)
        if not (folder / CONFIG).is_file():
            return DRAFT_MODEL
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        names = tensor_names(folder)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    except (OSError, ValueError):  # the method that reads the folder reports the error
        return DRAFT_MODEL
    if not isinstance(config, dict) or not names:
        return DRAFT_MODEL
    try:
        return recognise(config, names).method or str(config["speculators_model_type"])
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def takes(method: str, drafter: Any, model: Any) -> bool:
    """Return whether a method drafts with a model: one of its own layout, or a language model where it takes any.

    Args:
        drafter: the method's class; one around another drafter takes all that some other method does.
    Raises:
        ModelError: as :func:`method_for`.
    """
    declared, own = drafter.declared, method_for(model)
    around = declared.finds_model or "drafter" in drafter.Config.__dataclass_fields__
    return own == method or (declared.draft_model and (around or own == DRAFT_MODEL))


def opened(place: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return config and tensors of a folder or a GGUF file.

    Raises:
        FileNotFoundError: one of both is missing.
        ModelError, ValueError: they are damaged.
    """
    if place.is_file() and is_gguf(place):
        from foretoken.drafting.published.gguf_head import gguf_head

        return gguf_head(place)
    return json.loads((place / CONFIG).read_text(encoding="utf-8")), tensors_of(place)


def tensor_names(folder: Path) -> list[str]:
    """Return the names of a folder's tensors; of safetensors without reading them.

    Raises:
        OSError, ValueError: a file is damaged.
    """
    if (folder / WEIGHTS).is_file():
        with (folder / WEIGHTS).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            header = json.loads(file.read(min(size, 100 << 20)))
        return [name for name in header if name != "__metadata__"]
    for name in (WEIGHTS, BIN):
        if (folder / f"{name}.index.json").is_file():
            return sorted(_placed(folder / f"{name}.index.json"))
    return sorted(_unpickled(folder / BIN)) if (folder / BIN).is_file() else []


def tensors_of(folder: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """Return the tensors of a file, of those that its index places them in, or of torch's file in its place.

    Raises:
        FileNotFoundError: there is none of these.
        ValueError: an index names no files next to it or one that is missing, or a file holds more than tensors.
    """
    from safetensors.torch import load_file

    for file, read in ((name, load_file), (BIN, _unpickled)):
        if (folder / file).is_file():
            return read(folder / file)
        index = folder / f"{file}.index.json"
        if not index.is_file():
            continue
        found: dict[str, Tensor] = {}
        for each in sorted(set(_placed(index).values())):
            if not (folder / each).is_file():
                raise ValueError(f"its file {each} is missing")
            found |= read(folder / each)
        return found
    raise FileNotFoundError(folder / name)


def _placed(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    if not isinstance(placed, dict) or not all(
        isinstance(each, str) and Path(each).name == each for each in placed.values()
    ):
        raise ValueError(f"{index.name}: its weight_map names something else than files next to it")
    return placed


def _unpickled(file: Path) -> dict[str, Any]:
    """The tensors of a file of torch; nothing else in it is made."""
    import pickle

    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        raise ValueError(f"{file.name} holds more than tensors, and is not opened") from None
    if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ValueError(f"{file.name} holds something else than tensors by name")
    return found
