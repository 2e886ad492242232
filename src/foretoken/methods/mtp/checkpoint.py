"""A checkpoint with a prediction layer, in the published layout: the target's files, and one additional shard.

model-00001-of-00002.safetensors     the target's weights, unchanged (links, if the disk supports them)
model-00002-of-00002.safetensors     the layer, with the names of its family (layouts.py)
model.safetensors.index.json         the shard of each tensor
config.json                          num_nextn_predict_layers = 1, in families with this field
"""

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.files import write_whole
from foretoken.methods.mtp.layouts import EMBEDDING, HEAD
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import INDEX, Shards

CONFIG = "config.json"
_CHOOSING = "e_score_correction_bias"  # float32 in every published checkpoint
_NOT_OURS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def check_place(folder: Path, source: Path, ours: Path) -> None:
    """Refuse an unsuitable output folder.

    Args:
        source: folder of the target.
        ours: a file that a training run leaves in its folder.
    Raises:
        ConfigError: the folder is a file, the target's own folder, or contains another model.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: this is a file; name a folder to make")
    if folder.resolve() == source.resolve():
        raise ConfigError(f"--out {folder}: this is the target; name another folder to make")
    if (folder / CONFIG).is_file() and not (folder / ours).is_file():
        raise ConfigError(f"--out {folder}: another model lies there; name a folder to make")


def write(layer: PredictionLayer, source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a whole checkpoint.

    Args:
        source: folder of the target; an existing prediction layer is replaced.
        folder: destination.
        dtype: of the layer's weights.
    Raises:
        ForetokenError: a file cannot be read or written.
    """
    from safetensors.torch import save

    shards = Shards(str(source))
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    prefix = layer.layout.prefix_in(config["num_hidden_layers"])
    kept = {name: shard for name, shard in shards.file_of.items() if not name.startswith(prefix)}
    files = sorted(set(kept.values()))
    count = len(files) + 1
    named = {shard: f"model-{number:05}-of-{count:05}.safetensors" for number, shard in enumerate(files, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (CONFIG, INDEX, *(path.name for path in folder.glob("*.safetensors"))):
        (folder / stale).unlink(missing_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_OURS) and path.name not in (CONFIG, "training.json"):
            shutil.copyfile(path, folder / path.name)
    for shard, name in named.items():
        _link(source / shard, folder / name)
    weights = {f"{prefix}{name}": _stored(name, value, dtype) for name, value in layer.tensors().items()}
    for name, table in ((EMBEDDING, layer.embedding_VW), (HEAD, layer.head_VW)):
        if name in layer.layout.copies:
            weights[prefix + name] = _stored(name, table, dtype)
    last = f"model-{count:05}-of-{count:05}.safetensors"
    write_whole(folder / last, save(weights, {"format": "pt"}))
    placed = {name: named[shard] for name, shard in kept.items()} | dict.fromkeys(weights, last)
    size = sum((folder / name).stat().st_size for name in set(placed.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")
    if layer.layout.copies:
        config["num_nextn_predict_layers"] = 1
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    kept = torch.float32 if name.endswith(_CHOOSING) else dtype
    return value.detach().cpu().to(kept, copy=True).contiguous()


def _link(source: Path, place: Path) -> None:
    """Link a file, or copy it if the disk does not support links."""
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copyfile(source, place)
