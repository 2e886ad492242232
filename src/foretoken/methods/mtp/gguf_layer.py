"""Read the next-token-prediction layer of a GGUF file, the block after the target's, by the names of checkpoints."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.methods.mtp.layouts import EMBEDDING, EXPERTS, HEAD, Layout
from foretoken.models.gguf.blocks import dense
from foretoken.models.gguf.experts import is_stacked
from foretoken.models.gguf.library import MappedArchitecture
from foretoken.models.gguf.pieces import SplitFile, pieces_of

_NEXTN = {  # our names, or those of copies
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "eh_proj": "eh_proj.weight",
    "shared_head_norm": "norm.weight",
    "embed_tokens": EMBEDDING,
    "shared_head_head": HEAD,
}


def gguf_layer(path: Path, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of the layer by their names within a checkpoint, quantised ones as float32.

    Raises:
        ModelError: there is no layer, or the file is damaged.
    """
    pieces = pieces_of(path)
    file = SplitFile(pieces) if len(pieces) > 1 else pieces[0]
    architecture = MappedArchitecture(file)
    config = architecture.config
    block = f"blk.{config.num_hidden_layers}."
    twin = config.layer_types.index("full_attention")  # a block of the same kind: the library maps its names
    found: dict[str, Any] = {}
    stacks: dict[str, Tensor] = {}
    for name, entry in file.entries.items():
        if not name.startswith(block):
            continue
        leaf = name.removeprefix(block)
        value: Any = dense(file, replace(entry, shape=(prod(entry.shape[:-1]), entry.shape[-1]))).view(entry.shape)
        if is_stacked(name):
            stacks[leaf] = value
            continue
        part = leaf.removeprefix("nextn.").removesuffix(".weight")
        if leaf.startswith("nextn.") and part in _NEXTN:
            if "norm" in part:  # stored as the block's own norms are
                value = architecture.converted(f"blk.{twin}.attn_norm.weight", value)
            found[layout.parts.get(_NEXTN[part], _NEXTN[part])] = value
            continue
        place = architecture.place(f"blk.{twin}.{leaf}") or leaf
        inner = place.removeprefix(f"model.layers.{twin}.")
        found[layout.inner + inner] = architecture.converted(f"blk.{twin}.{leaf}", value)
    if layout.parts["eh_proj.weight"] not in found:
        raise ModelError(
            f"method 'mtp': '{path}' has no next-token-prediction layer: there is no tensor "
            f"{block}nextn.eh_proj.weight; many files are converted without it"
        )
    if stacks:
        both = [stacks[f"ffn_{each}_exps.weight"] for each in ("gate", "up")]
        found[f"{layout.inner}mlp.{EXPERTS}gate_up_proj"] = torch.cat(both, 1)
        found[f"{layout.inner}mlp.{EXPERTS}down_proj"] = stacks["ffn_down_exps.weight"]
    return found
