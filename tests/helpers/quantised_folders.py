"""Checkpoints in the layouts of GPTQ, AWQ and compressed-tensors, written from the formats' definitions.

Every writer takes a saved folder, quantises the linear layers of its blocks with random codes, scales and zero points,
and returns the dense weights that these stand for, computed here and not by the tested code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]  # a layer's tensors by their last names, and its weight, float32 [O, K]
Make = Callable[[int, int, Any], Made]  # of outputs, inputs and a generator


def write(source: Path, target: Path, settings: dict[str, Any], make: Make) -> dict[str, Tensor]:
    """A copy of a folder with quantised layers; the weights that they stand for, by the module's name."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    generator = torch.Generator().manual_seed(0)
    tensors, dense = {}, {}
    for name, tensor in load_file(target / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        if not module.endswith("_proj") or last != "weight":
            tensors[name] = tensor
            continue
        parts, dense[module] = make(*tensor.shape, generator)
        tensors.update({f"{module}.{key}": part.contiguous() for key, part in parts.items()})
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return dense


def change(folder: Path, **changes: Any) -> None:
    """Replace tensors of a folder by name, with __ for a dot; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def numbers(shape: tuple[int, ...], low: int, high: int, generator: Any) -> Tensor:
    """Whole numbers from low to high, both included."""
    return torch.randint(low, high + 1, shape, generator=generator)


def scales(shape: tuple[int, ...], dtype: torch.dtype, generator: Any) -> Tensor:
    return (0.02 + 0.2 * torch.rand(shape, generator=generator)).to(dtype)


def words(codes: Tensor, bits: int, dim: int, order: list[int] | None = None) -> Tensor:
    """Codes from 0 in 32-bit words along a dimension; ``order[i]`` is the code at place i of a word."""
    count = 32 // bits
    codes = codes.long().movedim(dim, -1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count))
    places = order or list(range(count))
    total = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for place, code in enumerate(places):
        total |= codes[..., code::count] << bits * place
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).movedim(-1, dim)


def _columns(inputs: int) -> Tensor:
    """An order of columns: one for all layers that read the same, since quantisers take it from the inputs."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def gptq(
    bits: int,
    group: int,
    *,
    version: int = 1,
    ordered: bool = False,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[dict[str, Any], Make]:
    """Settings, and the maker of a layer."""

    def make(outputs: int, inputs: int, generator: Any) -> Made:
        size = inputs if group == -1 else group
        count = inputs // size
        codes_KO = numbers((inputs, outputs), 0, 2**bits - 1, generator)
        lowest = 1 if version == 1 else 0
        zeros_GO = numbers((count, outputs), lowest, 2**bits - 1 + lowest, generator)
        if symmetric:
            zeros_GO[:] = 2 ** (bits - 1)
        scales_GO = scales((count, outputs), dtype, generator)
        of_column = torch.arange(inputs) // size
        if ordered:
            of_column = of_column[_columns(inputs)]
        dense = (codes_KO - zeros_GO[of_column]).double() * scales_GO[of_column].double()
        parts = {
            "qweight": words(codes_KO, bits, 0),
            "qzeros": words(zeros_GO - lowest, bits, 1),
            "scales": scales_GO,
            "g_idx": of_column.to(torch.int32),
        }
        return parts, dense.T.float()

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": ordered,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return settings, make


def awq(group: int, *, dtype: torch.dtype = torch.float16) -> tuple[dict[str, Any], Make]:
    """Settings, and the maker of a layer."""

    def make(outputs: int, inputs: int, generator: Any) -> Made:
        count = inputs // group
        codes_KO = numbers((inputs, outputs), 0, 15, generator)
        zeros_GO = numbers((count, outputs), 0, 15, generator)
        scales_GO = scales((count, outputs), dtype, generator)
        of_column = torch.arange(inputs) // group
        dense = (codes_KO - zeros_GO[of_column]).double() * scales_GO[of_column].double()
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {"qweight": words(codes_KO, 4, 1, order), "qzeros": words(zeros_GO, 4, 1, order), "scales": scales_GO}
        return parts, dense.T.float()

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return settings, make


def compressed(
    layout: str,
    bits: int,
    strategy: str,
    group: int | None = None,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    activations: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, Any], Make]:
    """Settings, and the maker of a layer."""
    middle = 2 ** (bits - 1)

    def make(outputs: int, inputs: int, generator: Any) -> Made:
        count = inputs // group if group else 1
        rows = 1 if strategy == "tensor" else outputs
        codes_OK = numbers((outputs, inputs), -middle, middle - 1, generator)
        zeros_OG = numbers((rows, count), -middle, middle - 1, generator) if not symmetric else torch.zeros(rows, count)
        scales_OG = scales((rows, count), dtype, generator)
        of_column = torch.arange(inputs) // (inputs // count)
        if ordered:
            of_column = of_column[_columns(inputs)]
        dense = (codes_OK - zeros_OG[:, of_column]).double() * scales_OG[:, of_column].double()
        parts = {"weight_scale": scales_OG.flatten() if strategy == "tensor" else scales_OG}
        if layout == "pack-quantized":
            parts["weight_packed"] = words(codes_OK + middle, bits, 1)
            parts["weight_shape"] = torch.tensor([outputs, inputs])
        else:
            parts["weight"] = codes_OK.to(torch.int8)
        if not symmetric:
            packed = layout == "pack-quantized"
            parts["weight_zero_point"] = words(zeros_OG + middle, bits, 0) if packed else zeros_OG.to(torch.int8)
        if ordered:
            parts["weight_g_idx"] = of_column.to(torch.int32)
        return parts, dense.float()

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
        "actorder": "group" if ordered else None,
    }
    dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": dynamic if activations else None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return settings, make
