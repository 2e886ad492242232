"""Quantised Hugging Face folders: every layout against its definition, and every way one can be refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load, load_as_is
from foretoken.models.quantised import folder as quantised_folder
from foretoken.native import build
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
    assert (load(tmp_path / "q", device="cpu", dtype="float32").native_decoder is None) == (build.library() is None)


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_rest_keeps_its_precision(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "plain", dtype=stored)
    made.write(tmp_path / "plain", tmp_path / "q", *made.awq(32))
    assert load(tmp_path / "q", device="cpu").dtype == dtype


def test_a_version_by_its_other_name(plain: Path, tmp_path: Path) -> None:
    settings, make = LAYOUTS["gptq-v2"]
    named = {**others(settings, "checkpoint_format"), "format": "gptq_v2"}
    expected = made.write(plain, tmp_path / "q", named, make)
    layer = load_as_is(tmp_path / "q", device="cpu").model.get_submodule(GATE)
    assert torch.equal(layer.quantised.dense(), expected[GATE])


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
    "a scale that is no number": ("scales", torch.eye(2, 96).div(0).half(), rf"not finite \('{GATE}.scales'\)"),
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


@pytest.mark.parametrize("value", [None, -1, -7])
def test_an_order_of_compressed_tensors_that_is_missing(value: int | None, plain: Path, tmp_path: Path) -> None:
    made.write(plain, tmp_path / "q", *LAYOUTS["packed-4-ordered"])
    order = load_file(tmp_path / "q" / "model.safetensors")[f"{GATE}.weight_g_idx"]
    if value is not None:
        order[5] = value
    made.change(tmp_path / "q", **{f"{GATE}.weight_g_idx": None if value is None else order})
    wanted = f"lacks its tensor '{GATE}.weight_g_idx'" if value is None else "do not fit its 4 scales"
    assert wanted in refusal(tmp_path / "q")
    made.change(tmp_path / "q", **({} if value is None else {f"{GATE}.weight_g_idx": torch.full_like(order, -1)}))
    if value is not None:  # in order after all, as the format has it
        layer = load_as_is(tmp_path / "q", device="cpu").model.get_submodule(GATE)
        assert layer.quantised.order_K is None


def test_codes_without_their_scales(plain: Path, tmp_path: Path) -> None:
    """The rest looks like a dense weight of whole numbers."""
    made.write(plain, tmp_path / "q", *LAYOUTS["naive"])
    made.change(tmp_path / "q", **{f"{GATE}.weight_scale": None})
    assert f"its tensor '{GATE}.weight' is of int8, no dtype of an unquantised weight" in refusal(tmp_path / "q")


def test_codes_without_a_quantisation_config_are_refused(plain: Path, tmp_path: Path) -> None:
    """The library would take them for weights, and pass over their scales."""
    made.write(plain, tmp_path / "q", *LAYOUTS["int"])
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps(others(config, "quantization_config")))
    found = refusal(tmp_path / "q")
    assert "'model.layers.0.mlp.down_proj.weight_scale' (21 such in all) belongs to a quantised layer" in found
    assert "no quantization_config" in found


def test_a_symmetric_layer_with_zero_points(plain: Path, tmp_path: Path) -> None:
    settings, make = LAYOUTS["packed-4-channel"]
    symmetric = json.loads(json.dumps(settings))
    symmetric["config_groups"]["group_0"]["weights"]["symmetric"] = True
    made.write(plain, tmp_path / "q", symmetric, make)
    assert "weight_zero_point' is not zero, and its quantization_config says symmetric=True" in refusal(tmp_path / "q")

    def in_the_middle(outputs: int, inputs: int, generator: Any) -> made.Made:
        parts, dense = LAYOUTS["naive"][1](outputs, inputs, generator)
        return {**parts, "weight_zero_point": torch.zeros(outputs, inputs // 32, dtype=torch.int8)}, dense

    expected = made.write(plain, tmp_path / "zeros", LAYOUTS["naive"][0], in_the_middle)
    layer = load_as_is(tmp_path / "zeros", device="cpu").model.get_submodule(GATE)
    assert torch.equal(layer.quantised.dense(), expected[GATE])


@pytest.mark.parametrize("key", ["weight_scale", "weight_zero_point"])
@pytest.mark.parametrize("count", [0, 2, 48])
def test_more_than_one_number_for_a_whole_tensor(key: str, count: int, plain: Path, tmp_path: Path) -> None:
    made.write(plain, tmp_path / "q", *LAYOUTS["int-tensor-zeros"])
    dtype = torch.bfloat16 if key == "weight_scale" else torch.int8
    made.change(tmp_path / "q", **{f"{GATE}.{key}": torch.ones(count, dtype=dtype)})
    assert f"the tensor '{GATE}.{key}' is [{count}]" in refusal(tmp_path / "q")


def test_the_files_pages_are_left_as_tensors_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr(quantised_folder, "leave", lambda tensor: left.append(tensor.numel() * tensor.element_size()))
    load(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        sizes = [each.numel() * each.element_size() for each in map(file.get_tensor, file.keys())]
    assert sorted(left) == sorted(sizes)


def test_values_that_are_not_finite_in_unquantised_tensors(folder: Path) -> None:
    norm = torch.ones(64, dtype=torch.bfloat16)
    norm[3] = torch.nan
    made.change(folder, **{"model.layers.2.input_layernorm.weight": norm})
    assert "'model.layers.2.input_layernorm.weight' holds values that are not finite" in refusal(folder)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_model_does_not_have(value: float, folder: Path) -> None:
    """Some programs write zeros for every layer."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{GATE}.bias"] = torch.full((96,), value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if value:
        assert f"its tensor '{GATE}.bias' has no place" in refusal(folder)
    else:
        assert load_as_is(folder, device="cpu").model.get_submodule(GATE).bias is None


def test_a_folder_as_auto_gptq_writes_it(plain: Path, folder: Path) -> None:
    """Settings next to the config, weights under a name of their own, tables that older libraries stored."""
    expected = load_as_is(folder, device="cpu").model.state_dict()
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(
        json.dumps(
            {"bits": 4, "group_size": 32, "desc_act": False, "sym": settings["sym"], "model_file_base_name": None}
        )
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "gptq_model-4bit-32g.safetensors", metadata={"format": "pt"})
    found = load_as_is(folder, device="cpu")
    assert isinstance(found.model.get_submodule(GATE), QuantisedLinear)
    assert all(torch.equal(found.model.state_dict()[name], value) for name, value in expected.items())
    assert found.fingerprint == fingerprint(folder)
    (folder / "quantize_config.json").write_text("[4")
    assert "its quantize_config.json cannot be read" in refusal(folder)


INDICES: dict[str, tuple[Any, str]] = {
    "no files": ({"weight_map": 3}, "model.safetensors.index.json cannot be read"),
    "a number": (3, "model.safetensors.index.json cannot be read"),
    "a file that is a list": ({"weight_map": {"a": ["b"]}}, "model.safetensors.index.json cannot be read"),
    "a file elsewhere": ({"weight_map": {"a": "../b"}}, "'weight_map' names something else than files next to it"),
    "a file that is not there": ({"weight_map": {"a": "b"}}, "its file b is missing"),
    "a tensor twice": ({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}, "' is in two of its files"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_damaged_index(case: str, folder: Path) -> None:
    index, message = INDICES[case]
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": -1}, "its config makes no model (RuntimeError: "),
        ({"vocab_size": 2}, "its config makes no model (AssertionError: "),
        ({"architectures": 3}, "its config says architectures=3, which is no list of names"),
        ({"architectures": [3]}, "its config says architectures=[3], which is no list of names"),
    ],
)
def test_a_config_that_makes_no_model(changes: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    assert message in refusal(folder)


def test_a_weight_that_is_missing(folder: Path) -> None:
    made.change(folder, **{"model.layers.2.input_layernorm.weight": None})
    assert "missing from the checkpoint ('model.layers.2.input_layernorm.weight', 1 in all)" in refusal(folder)
    made.change(folder, **{"model.layers.1.self_attn.k_proj.bias": None})
    assert "2 in all" in refusal(folder)


def test_a_file_that_is_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "its model.safetensors cannot be read (" in refusal(folder)
    assert "the checkpoint may be incomplete: fetch it again" in refusal(folder)


def test_a_tensor_with_a_meaning_that_is_not_read_is_refused(plain: Path, tmp_path: Path) -> None:
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


def others(base: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key != name}


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
    "bitblas": ({**others(GPTQ, "checkpoint_format"), "format": "bitblas"}, "format='bitblas'"),
    "marlin": (settings(GPTQ, checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    "layers of their own": (settings(GPTQ, dynamic={"-:lm_head": {}}), "dynamic"),
    "groups of another size": (settings(GPTQ, group_size=40), r"are no groups of 40 \(group_size\)"),
    "groups of no size": (settings(GPTQ, group_size=0), "group_size=0: a whole number, or -1"),
    "groups in words": (settings(GPTQ, group_size="32"), "group_size='32': a whole number, or -1"),
    "awq in words": (settings(AWQ, group_size=None), "group_size=None: a whole number, or -1"),
    "bits in halves": (settings(GPTQ, bits=4.0), "bits=4.0: 4, 8 can be read"),
    "an order in words": (settings(GPTQ, desc_act="no"), "desc_act='no': True, False can be read"),
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
    "groups that are none": (settings(COMPRESSED, config_groups=[3]), r"config_groups=\[3\], which is no JSON object"),
    "a group that is none": (settings(COMPRESSED, config_groups={"g": 3}), "g=3, which is no JSON object"),
    "weights that are none": (one_group(weights="int4"), "weights='int4', which is no JSON object"),
    "a group of no size": (of_weights(group_size=None), "group_size=None: a whole number"),
    "symmetric in words": (of_weights(symmetric="no"), "symmetric='no': True, False can be read"),
    "an unknown order": (of_weights(actorder="odd"), "actorder='odd'"),
    "activations that are none": (one_group(input_activations=8), "input_activations=8, which is no JSON object"),
    "a target that is none": (one_group(targets=[3]), r"targets=\[3\], which is no list of texts"),
    "a pattern that is none": (one_group(targets=["re:("]), r"the target 're:\(': missing"),
    "another layer's": (one_group(targets=["lm_head"]), "does not say how"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_unreadable_format_names_the_readable_ones(case: str, plain: Path, tmp_path: Path) -> None:
    found, message = UNREAD[case]
    make = (LAYOUTS["packed-4"] if found.get("quant_method") == "compressed-tensors" else LAYOUTS["gptq"])[1]
    made.write(plain, tmp_path / "q", found, make)
    assert re.search(message, refusal(tmp_path / "q"))


def test_zero_points_far_from_the_middle_with_long_scales(plain: Path, tmp_path: Path) -> None:
    made.write(plain, tmp_path / "q", *made.gptq(8, 32, dtype=torch.float32))
    assert "scales of float32 that no shorter format holds" in refusal(tmp_path / "q")
