"""A folder that is written in GPTQ's layout opens, and every weight is the nearest one of its group's grid."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.models.load import load_as_is
from foretoken_lab.peers.gptq import write_gptq
from helpers.tiny_models import save_model

GROUP = 16


def test_the_written_folder_opens_with_the_nearest_weights(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "plain", dtype=torch.float32)
    write_gptq(folder, tmp_path / "written", GROUP)
    stored = load_file(folder / "model.safetensors")
    layers = {
        name: each
        for name, each in load_as_is(tmp_path / "written", device="cpu").model.named_modules()
        if isinstance(each, QuantisedLinear)
    }
    assert len(layers) == len([name for name in stored if name.endswith("_proj.weight")])
    for name, layer in layers.items():
        weight_OK = stored[f"{name}.weight"]
        grouped = weight_OK.view(weight_OK.shape[0], -1, GROUP)
        step = (grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)) / 15
        error = (layer.quantised.dense() - weight_OK).view_as(grouped).abs()
        assert (error <= 1.01 * step[..., None]).all(), name  # half a step, and half of the rounded zero point's
        assert error.mean() < 0.3 * step.mean(), name
