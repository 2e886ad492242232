"""The next-token-prediction layer of a checkpoint, read from its shards by name (layouts.py): the library drops it.

Only the tensors that are wanted are read; of a checkpoint in many files, only those files are opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import ModelError, UnsupportedArchitecture
from foretoken.methods.mtp.layouts import LAYOUTS
from foretoken.models.fingerprint import folder_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PROJECTION = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")  # which ordinary layers have not
_REMEDY = "use the checkpoint as it was published: what transformers saves has lost the layer"


class Shards:
    """Where a checkpoint's tensors lie.

    Args:
        source: folder, or hub id of which there is a local copy.
    Raises:
        ModelError: it has no safetensors, or its index is damaged.
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
                raise ModelError(
                    f"{self.folder}: has no safetensors, where next-token-prediction layers are looked for"
                )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"{self.folder}: its index of tensors cannot be read: {error}") from None

    def has(self, prefix: str) -> bool:
        """Whether any tensor name begins so."""
        return any(each.startswith(prefix) for each in self.file_of)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name.

        Raises:
            ModelError: a shard is missing or damaged; it is named, with a tensor that lies in it.
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
    """The tensors of the layer after the last one, by their names within it.

    Args:
        config: the target's.
        source: folder or hub id of the target.
        name: of the target, for messages.
    Raises:
        UnsupportedArchitecture: it is of another layout, or quantised.
        ModelError: the layer is not there, or elsewhere.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in LAYOUTS:
        *others, last = LAYOUTS
        raise UnsupportedArchitecture(
            f"method 'mtp': '{name}' is of type '{text.model_type}'; next-token-prediction layers are known of "
            f"{', '.join(others)} and {last}; 'foretoken train mtp' makes a checkpoint that brings one"
        )
    shards, count = Shards(source), text.num_hidden_layers
    prefix = LAYOUTS[text.model_type].prefix_in(count)
    there = sorted(int(match[1]) for each in shards.file_of if (match := _PROJECTION.fullmatch(each)))
    if there and count not in there:
        raise ModelError(
            f"method 'mtp': the layer of '{name}' must be {prefix}*, after num_hidden_layers={count}, "
            f"but there is model.layers.{there[0]}.*: it is of a target of another depth"
        )
    if not shards.has(prefix):
        raise ModelError(
            f"method 'mtp': '{name}' brings no next-token-prediction layer: there is no tensor {prefix}*; {_REMEDY}"
        )
    found = shards.read(each for each in shards.file_of if each.startswith(prefix))
    for each, value in found.items():
        if each.endswith("weight_scale_inv") or value.dtype.itemsize < 2:
            raise UnsupportedArchitecture(
                f"method 'mtp': {each} of '{name}' is quantised ({value.dtype}): bfloat16, float16, float32 are known"
            )
    return {each.removeprefix(prefix): value for each, value in found.items()}
