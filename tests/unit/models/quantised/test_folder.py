"""Quantised Hugging Face folders: every layout against its definition, and every way one can be refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretoken.core.errors import ModelError
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load, load_as_is
from foretoken.models.quantised.weight import QuantisedLinear
from helpers import quantised_folders as made
from helpers.tiny_models import save_model

LAYOUTS = {
    "gptq": made.gptq(4, 32),
    "gptq-8": made.gptq(8, 32),
    "gptq-rows": made.gptq(4, -1),
    "gptq-symmetric": made.gptq(4, 16, symmetric=True),
    "gptq-8-symmetric": made.gptq(8, -1, symmetric=True),
    "gptq-ordered": made.gptq(4, 16, ordered=True),
    "gptq-8-ordered-v2": made.gptq(8, 32, ordered=True, version=2),
    "gptq-v2": made.gptq(4, 32, version=2),
    "gptq-float32": made.gptq(4, 32, dtype=torch.float32),
    "awq": made.awq(32),
    "awq-float32": made.awq(16, dtype=torch.float32),
    "packed-4": made.compressed("pack-quantized", 4, "group", 32),
    "packed-4-zeros": made.compressed("pack-quantized", 4, "group", 16, symmetric=False),
    "packed-4-ordered": made.compressed("pack-quantized", 4, "group", 16, symmetric=False, ordered=True),
    "packed-4-float32": made.compressed("pack-quantized", 4, "group", 32, symmetric=False, dtype=torch.float32),
    "packed-4-channel": made.compressed("pack-quantized", 4, "channel", symmetric=False),
    "packed-8": made.compressed("pack-quantized", 8, "channel"),
    "packed-8-zeros": made.compressed("pack-quantized", 8, "group", 32, symmetric=False, dtype=torch.float16),
    "int": made.compressed("int-quantized", 8, "channel", activations=True),
    "int-zeros": made.compressed("int-quantized", 8, "channel", symmetric=False),
    "naive": made.compressed("naive-quantized", 8, "group", 32),
    "naive-4": made.compressed("naive-quantized", 4, "group", 32, symmetric=False),
    "int-tensor": made.compressed("int-quantized", 8, "tensor"),
    "int-tensor-zeros": made.compressed("int-quantized", 8, "tensor", symmetric=False),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # biases on some layers; a tied head that stays as it is
    return save_model("qwen2", tmp_path_factory.mktemp("qwen2"), dtype=torch.bfloat16, tie_word_embeddings=True)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Of GPTQ, to damage."""
    made.write(plain, tmp_path / "gptq", *made.gptq(4, 32))
    return tmp_path / "gptq"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_what_its_format_says(layout: str, plain: Path, tmp_path: Path) -> None:
    expected = made.write(plain, tmp_path / "q", *LAYOUTS[layout])
    model = load_as_is(tmp_path / "q", device="cpu").model
    found = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
    assert set(found) == set(expected)
    assert len(found) == 3 * 7
    for name, module in found.items():
        assert torch.equal(module.quantised.dense(), expected[name]), name
        assert not list(module.parameters())  # it moves its tensors by itself
    assert {each.quantised.bits for each in found.values()} == {8 if layout in EIGHT else 4}
    stored = load_file(plain / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].to(parameter.dtype)), name
    bias = model.model.layers[1].self_attn.k_proj.bias
    assert torch.equal(bias, stored["model.layers.1.self_attn.k_proj.bias"].to(bias.dtype))
    assert model.lm_head.weight is model.model.embed_tokens.weight


EIGHT = {name for name in LAYOUTS if "8" in name or name.startswith(("int", "naive"))} | {
    # the difference of code and zero point, since products with scales of float32 would be rounded
    "gptq-float32",
    "awq-float32",
    "packed-4-float32",
}
EIGHT -= {"naive-4"}


def test_a_layer_computes_with_its_columns_in_their_order(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    weight = made.write(plain, tmp_path / "q", *made.gptq(4, 32, ordered=True))[name]
    layer = load_as_is(tmp_path / "q", device="cpu").model.get_submodule(name)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    expected = x @ weight.T
    assert (layer(x) - expected).norm() / expected.norm() < 0.02  # activations of 8 bits
    in_order = QuantisedLinear(replace(layer.quantised, order_K=None))
    assert (in_order(x) - expected).norm() / expected.norm() > 0.5


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_rest_keeps_its_precision(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "plain", dtype=stored)
    made.write(tmp_path / "plain", tmp_path / "q", *made.awq(32))
    assert load(tmp_path / "q", device="cpu").dtype == dtype


def test_layers_of_their_own_schemes(plain: Path, tmp_path: Path) -> None:
    """A layer's name goes before its class, and patterns are regular expressions."""
    settings, make = made.compressed("pack-quantized", 4, "group", 32)
    made.write(plain, tmp_path / "q", settings, make)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    other, _ = made.compressed("pack-quantized", 4, "group", 16)
    groups["group_1"] = {**other["config_groups"]["group_0"], "targets": ["re:.*layers.1.*up_proj"]}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight_scale' is \[96, 2\] .*: \[96, 4\]"):
        load(tmp_path / "q", device="cpu")
    codes, scales = torch.zeros(96, 8, dtype=torch.int32), torch.full((96, 4), 0.5, dtype=torch.bfloat16)
    up = "model.layers.1.mlp.up_proj"
    made.change(tmp_path / "q", **{f"{up}.weight_packed": codes, f"{up}.weight_scale": scales})
    model = load_as_is(tmp_path / "q", device="cpu").model
    assert model.get_submodule(up).quantised.group == 16
    assert model.get_submodule("model.layers.0.mlp.up_proj").quantised.group == 32


def test_its_fingerprint_is_its_own(plain: Path, folder: Path, tmp_path: Path) -> None:
    made.write(plain, tmp_path / "other", *made.gptq(4, 16))
    prints = {fingerprint(each) for each in (plain, folder, tmp_path / "other")}
    assert len(prints) == 3
    assert load_as_is(folder, device="cpu").fingerprint == fingerprint(folder)


# ------------------------------------------------------------------ refused


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, device="cpu")
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


GATE = "model.layers.1.mlp.gate_proj"
DAMAGE: dict[str, tuple[str, Any, str]] = {
    "no zero points": ("qzeros", None, f"'{GATE}' lacks its tensor '{GATE}.qzeros'"),
    "no scales": ("scales", None, f"'{GATE}' lacks its tensor '{GATE}.scales'"),
    "scales that are no numbers": ("scales", torch.full((2, 96), float("nan")).half(), "scales that are not finite"),
    "scales without end": ("scales", torch.full((2, 96), float("inf")).half(), "scales that are not finite"),
    "other groups": ("scales", torch.ones(4, 96).half(), r"is \[4, 96\] of float16: \[2, 96\]"),
    "codes of another shape": ("qweight", torch.ones(8, 95, dtype=torch.int32), r"is \[8, 95\] of int32: \[8, 96\]"),
    "codes of another type": ("qweight", torch.ones(8, 96), r"of float32: \[8, 96\] of int32"),
    "a group that is not there": ("g_idx", torch.full((64,), 7, dtype=torch.int32), "do not fit its 2 scales"),
    "a negative group": ("g_idx", torch.full((64,), -1, dtype=torch.int32), "do not fit its 2 scales"),
    "groups of unequal size": ("g_idx", (torch.arange(64) > 9).to(torch.int32), "groups of different sizes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_layer(damage: str, folder: Path) -> None:
    key, value, message = DAMAGE[damage]
    made.change(folder, **{f"{GATE}.{key}": value})
    assert re.search(message, refusal(folder))


def test_an_order_that_is_missing(plain: Path, tmp_path: Path) -> None:
    made.write(plain, tmp_path / "q", *made.gptq(4, 32, ordered=True))
    made.change(tmp_path / "q", **{f"{GATE}.g_idx": None})
    assert f"lacks its tensor '{GATE}.g_idx'" in refusal(tmp_path / "q")


def test_a_weight_that_is_missing(folder: Path) -> None:
    made.change(folder, **{"model.layers.2.input_layernorm.weight": None})
    assert "missing from the checkpoint ('model.layers.2.input_layernorm.weight', 1 in all)" in refusal(folder)
    made.change(folder, **{"model.layers.1.self_attn.k_proj.bias": None})
    assert "2 in all" in refusal(folder)


def test_a_file_that_is_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "the checkpoint may be incomplete: fetch it again" in refusal(folder)


def test_a_tensor_beside_a_layer_that_means_something(plain: Path, tmp_path: Path) -> None:
    def make(outputs: int, inputs: int, generator: Any) -> made.Made:
        parts, dense = compressed(outputs, inputs, generator)
        return {**parts, "input_scale": torch.ones(1)}, dense

    settings, compressed = made.compressed("int-quantized", 8, "channel")
    made.write(plain, tmp_path / "q", settings, make)
    assert "has a tensor 'model.layers.0.mlp.down_proj.input_scale', which is not read" in refusal(tmp_path / "q")


def test_experts(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path / "plain")
    made.write(tmp_path / "plain", tmp_path / "q", *made.gptq(4, 8))
    assert "'model.layers.0.mlp.experts.0.down_proj.qweight' has no linear layer of its own" in refusal(tmp_path / "q")


def settings(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


GPTQ, AWQ, COMPRESSED = (each[0] for each in (made.gptq(4, 32), made.awq(32), LAYOUTS["packed-4"]))
GROUP = COMPRESSED["config_groups"]["group_0"]


def one_group(**changes: Any) -> dict[str, Any]:
    return settings(COMPRESSED, config_groups={"group_0": {**GROUP, **changes}})


def of_weights(**changes: Any) -> dict[str, Any]:
    return one_group(weights={**GROUP["weights"], **changes})


STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
UNREAD = {
    "fp8": (
        {"quant_method": "fp8"},
        "quantised with 'fp8', which is not read: awq, compressed-tensors, gptq with 4 or 8",
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "and GGUF files"),
    "nothing said": ({}, "quantised with 'None'"),
    "3 bits": (settings(GPTQ, bits=3), r"\(gptq\): its quantization_config says bits=3: 4, 8 can be read"),
    "marlin": (settings(GPTQ, checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    "layers of their own": (settings(GPTQ, dynamic={"-:lm_head": {}}), "dynamic"),
    "groups of no size": (settings(GPTQ, group_size=40), "are no groups of 40"),
    "awq of 8 bits": (settings(AWQ, bits=8), "bits=8: 4 can be read"),
    "gemv": (settings(AWQ, version="gemv"), "version='gemv': 'gemm'"),
    "no zero points": (settings(AWQ, zero_point=False), "zero_point=False"),
    "nvfp4": (
        settings(COMPRESSED, format="nvfp4-pack-quantized"),
        "format='nvfp4-pack-quantized': 'pack-quantized', 'na",
    ),
    "float8": (of_weights(type="float", num_bits=8), "type='float': 'int'"),
    "2 bits": (of_weights(num_bits=2), "num_bits=2"),
    "blocks": (of_weights(strategy="block"), "strategy='block'"),
    "static activations": (one_group(input_activations=STATIC), "rounds activations with dynamic=False: only True"),
    "4-bit activations": (one_group(input_activations={**STATIC, "dynamic": True, "num_bits": 4}), "num_bits=4"),
    "outputs": (one_group(output_activations=STATIC), "output_activations"),
    "2:4": (
        settings(COMPRESSED, sparsity_config={"format": "sparse-24-bitmask"}),
        "format='sparse-24-bitmask': 'dense'",
    ),
    "keys and values": (settings(COMPRESSED, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "rotations": (settings(COMPRESSED, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "not finished": (settings(COMPRESSED, quantization_status="frozen"), "quantization_status='frozen': 'compressed'"),
    "no groups": (settings(COMPRESSED, config_groups={}), "config_groups"),
    "another layer's": (one_group(targets=["lm_head"]), "does not say how"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_not_read_says_what_is(case: str, plain: Path, tmp_path: Path) -> None:
    found, message = UNREAD[case]
    make = (LAYOUTS["packed-4"] if found.get("quant_method") == "compressed-tensors" else LAYOUTS["gptq"])[1]
    made.write(plain, tmp_path / "q", found, make)
    assert re.search(message, refusal(tmp_path / "q"))


def test_zero_points_far_from_the_middle_with_long_scales(plain: Path, tmp_path: Path) -> None:
    made.write(plain, tmp_path / "q", *made.gptq(8, 32, dtype=torch.float32))
    assert "scales of float32 that no shorter format holds" in refusal(tmp_path / "q")
