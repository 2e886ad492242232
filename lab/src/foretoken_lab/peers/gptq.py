"""Write a GPTQ folder (4 bits, its first layout) from one in float32, rounded to the nearest.

The layout is GPTQ's; the rounding is not, which would need texts to calibrate it. So the folder says what rounding of
activations adds to its weights, and nothing about the quality of GPTQ's own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_BITS = 4
_PER_WORD = 32 // _BITS


def write_gptq(source: Path, target: Path, group: int = 64) -> None:
    """Quantise the linear layers of the blocks.

    Args:
        source: a folder with ``model.safetensors``.
        target: a folder that does not exist yet.
        group: inputs that share a scale and a zero point.
    """
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": _BITS,
        "group_size": group,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": "gptq",
    }
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = quantise(weight, group)
            tensors.update({f"{name.removesuffix('weight')}{key}": part for key, part in parts.items()})
        else:
            tensors[name] = weight
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def quantise(weight_OK: Tensor, group: int) -> dict[str, Tensor]:
    """A layer's tensors in the layout of ``foretoken.models.quantised.gptq``; weights [O, K], floating."""
    outputs, inputs = weight_OK.shape
    grouped = weight_OK.float().view(outputs, inputs // group, group)
    low, high = grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=0.0)
    scales_OG = ((high - low) / (2**_BITS - 1)).clamp(min=1e-7).half()
    zeros_OG = (-low / scales_OG.float()).round().clamp(1, 2**_BITS - 1)  # zero points are stored less one
    codes = (grouped / scales_OG.float()[..., None]).round() + zeros_OG[..., None]
    codes_OK = codes.clamp(0, 2**_BITS - 1).view(outputs, inputs).long()
    return {
        "qweight": _words(codes_OK).T.contiguous(),
        "qzeros": _words(zeros_OG.T.long() - 1),
        "scales": scales_OG.T.contiguous(),
        "g_idx": (torch.arange(inputs) // group).to(torch.int32),
    }


def _words(codes: Tensor) -> Tensor:
    """Codes [N, M] packed along M, the first of a word in its lowest bits: int32 [N, M / 8]."""
    shifts = _BITS * torch.arange(_PER_WORD)
    total = (codes.view(codes.shape[0], -1, _PER_WORD) << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)
