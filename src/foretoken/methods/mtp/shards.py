"""Read the next-token-prediction layer of a checkpoint from its shards by name (layouts.py): transformers drops it.

Only the requested tensors are read; of a checkpoint in many files, only their files are opened.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import ModelError, UnsupportedArchitecture
from foretoken.methods.mtp.gguf_layer import gguf_layer
from foretoken.methods.mtp.layouts import LAYOUTS
from foretoken.models.fingerprint import folder_of
from foretoken.models.gguf.magic import is_gguf

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PROJECTION = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")  # ordinary layers lack it
_REMEDY = "use the published checkpoint: transformers drops the layer when it saves a model"


class Shards:
    """The files of a checkpoint's tensors.

    Args:
        source: folder, or hub id with a local copy.
    Raises:
        ModelError: the folder has no safetensors, or its index is damaged.
    """

    def __init__(self, source: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder_of(source)
        try:
            if (self.folder / INDEX).is_file():
                index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
                self.file_of: dict[str, str] = dict(index["weight_map"])
            elif (self.folder / SINGLE).is_file():
                with safe_open(self.folder / SINGLE, framework="pt") as file:
                    self.file_of = dict.fromkeys(file.keys(), SINGLE)
            else:
                raise ModelError(f"{self.folder}: has no safetensors, which next-token-prediction layers are read from")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"{self.folder}: its index of tensors cannot be read: {error}") from None

    def has(self, prefix: str) -> bool:
        """Whether any tensor name begins with the prefix."""
        return any(each.startswith(prefix) for each in self.file_of)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name.

        Raises:
            ModelError: a shard is missing or damaged; the message names it and one of its tensors.
        """
        from safetensors import SafetensorError, safe_open

        wanted: dict[str, list[str]] = {}
        for name in names:
            wanted.setdefault(self.file_of[name], []).append(name)
        found = {}
        for shard, inside in sorted(wanted.items()):
            path = Path(self.folder / shard)
            if not path.is_file():
                raise ModelError(f"{self.folder}: the shard {shard} with {inside[0]} is missing; fetch it")
            try:
                with safe_open(path, framework="pt") as file:
                    found.update({name: file.get_tensor(name) for name in inside})
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: cannot be read: {error}") from None
        return found


def read_layer(config: Any, source: str, name: str) -> dict[str, Tensor]:
    """Return the tensors of the layer after the last one, by their names within it.

    Args:
        config: the target's.
        source: folder or hub id of the target.
        name: of the target, for messages.
    Raises:
        UnsupportedArchitecture: the layer has another layout, or is quantised.
        ModelError: the layer is missing, or has another number.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in LAYOUTS:
        *others, last = LAYOUTS
        raise UnsupportedArchitecture(
            f"method 'mtp': '{name}' is of type '{text.model_type}'; next-token-prediction layers are supported for "
            f"{', '.join(others)} and {last}; 'foretoken train mtp' makes a checkpoint with one"
        )
    if is_gguf(Path(source)):
        return gguf_layer(Path(source), LAYOUTS[text.model_type])
    shards, count = Shards(source), text.num_hidden_layers
    prefix = LAYOUTS[text.model_type].prefix_in(count)
    there = sorted(int(match[1]) for each in shards.file_of if (match := _PROJECTION.fullmatch(each)))
    if there and count not in there:
        raise ModelError(
            f"method 'mtp': the layer of '{name}' must be {prefix}*, after num_hidden_layers={count}, "
            f"but there is model.layers.{there[0]}.*: it belongs to a target of another depth"
        )
    if not shards.has(prefix):
        raise ModelError(
            f"method 'mtp': '{name}' has no next-token-prediction layer: there is no tensor {prefix}*; {_REMEDY}"
        )
    found = shards.read(each for each in shards.file_of if each.startswith(prefix))
    for each, value in found.items():
        if each.endswith("weight_scale_inv") or value.dtype.itemsize < 2:
            raise UnsupportedArchitecture(
                f"method 'mtp': {each} of '{name}' is quantised ({value.dtype}): use bfloat16, float16 or float32"
            )
    return {each.removeprefix(prefix): value for each, value in found.items()}
