"""``dtype="int8"`` and ``"int4"``: the rounded layers, the refusals, and that drafts change no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from foretoken.core.errors import ConfigError, ModelError
from foretoken.engine.llm import LLM
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, rounded
from foretoken.models import load as loading
from foretoken.models.load import load
from foretoken.models.quantised.rounding import SCHEMES, precision_of, round_weights
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.tiny_models import save_model

PROMPTS = ["Ka ba ri", "to", "a b a b a b a b"]


@pytest.fixture(autouse=True)
def general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_linear_layers_are_rounded_and_nothing_else(saved: Path, dtype: str) -> None:
    plain, found = load(saved, device="cpu", dtype="float32"), load(saved, device="cpu", dtype=dtype)
    weights = dict(plain.model.named_parameters())
    left = dict(found.model.named_parameters())
    assert {name for name in left if "embed" not in name and "norm" not in name} == set()
    for name, module in found.model.named_modules():
        if isinstance(module, QuantisedLinear):
            expected = rounded(load_file(saved / "model.safetensors")[f"{name}.weight"], *SCHEMES[dtype])
            assert torch.equal(module.weight, expected.dense())
    for name, weight in left.items():
        assert torch.equal(weight, weights[name])
    assert found.precision == dtype
    assert found.num_parameters == plain.num_parameters
    assert found.sizes == plain.sizes


def test_a_tied_head_is_rounded_and_its_embedding_is_not() -> None:
    plain, found = load("zoo:draft", device="cpu"), load("zoo:draft", device="cpu", dtype="int4")
    assert isinstance(found.model.lm_head, QuantisedLinear)
    assert torch.equal(found.model.model.embed_tokens.weight, plain.model.model.embed_tokens.weight)
    assert found.num_parameters == plain.num_parameters
    assert found.sizes == plain.sizes


def test_routers_stay_as_they_are() -> None:
    """A small linear layer that chooses experts is not worth its risk."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(64, 4), nn.Linear(64, 32)

    layer = Layer().requires_grad_(requires_grad=False)
    round_weights(layer, "int4", "m")
    assert type(layer.gate) is nn.Linear
    assert isinstance(layer.up, QuantisedLinear)
    assert precision_of(layer) == "int4"
    with pytest.raises(ConfigError, match="quantised already"):
        round_weights(layer, "int8", "m")


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafts_do_not_change_the_text(family: str, method: str, dtype: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "target")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(save_model(family, tmp_path / "draft", seed=7))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = LLM(folder, dtype=dtype, device="cpu", speculative_config=None).generate(PROMPTS, params)
    drafted = LLM(folder, dtype=dtype, device="cpu", speculative_config=config).generate(PROMPTS, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_gpu_is_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "place_of", lambda device: torch.device(device))
    with pytest.raises(ConfigError, match=rf"dtype='{dtype}'.*device='cuda:0'.*device='cpu'"):
        load("zoo:draft", dtype=dtype, device="cuda:0")


def test_rows_that_are_no_whole_groups(tmp_path: Path) -> None:
    folder = save_model("llama_odd_heads", tmp_path)
    with pytest.raises(ConfigError, match=r"'lm_head\.weight'.*48.*groups of 32.*'int8'"):
        load(folder, dtype="int4", device="cpu")
    assert load(folder, dtype="int8", device="cpu").precision == "int8"


def test_weights_that_are_not_finite(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(saved / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'.*not finite"):
        load(tmp_path, dtype="int4", device="cpu")


@pytest.mark.parametrize(("dtype", "threshold"), [("int8", 0.02), ("int4", 0.2)])
def test_experts_are_rounded_one_by_one(dtype: str, threshold: float, tmp_path: Path) -> None:
    """Each expert's rows as a linear layer's, whoever shares them."""
    folder = save_model("qwen3_moe", tmp_path)
    plain, found = (load(folder, device="cpu", dtype=each).model.model.layers[0].mlp for each in ("float32", dtype))
    own, experts = plain.experts, found.experts
    assert isinstance(experts, QuantisedExperts)
    assert torch.equal(found.gate.weight, plain.gate.weight)
    scheme = SCHEMES[dtype]
    for expert in range(len(own.gate_up_proj)):
        expected = rounded(own.gate_up_proj[expert], *scheme), rounded(own.down_proj[expert], *scheme)
        for linear, weight in zip(experts.linears(expert), expected, strict=True):
            assert torch.equal(linear.weight, weight.dense())
    assert torch.equal(experts.down_proj[1], experts.linears(1)[1].weight)
    generator = torch.Generator().manual_seed(1)
    x_RD, chosen_Rk = torch.randn(6, 64, generator=generator), torch.tensor([[0, 2], [2, 0], [1, 3]]).repeat(2, 1)
    shares_Rk = torch.rand(6, 2, generator=generator)
    ours, theirs = (module(x_RD, chosen_Rk, shares_Rk) for module in (experts, own))
    assert 0 < (ours - theirs).square().mean().sqrt() < threshold * theirs.square().mean().sqrt()
    assert torch.equal(experts(x_RD[2:3], chosen_Rk[2:3], shares_Rk[2:3])[0], ours[2])


def test_mixtures_of_another_build_keep_their_dtype_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(save_model("gpt_oss", tmp_path), device="cpu", dtype="int8")
    assert model.precision == "int8"
    assert isinstance(model.model.model.layers[0].mlp.experts.gate_up_proj, nn.Parameter)
    (said,) = [record.message for record in caplog.records if "keep their dtype" in record.message]
    assert "4 mixtures of experts" in said
    assert "'model.layers.0.mlp.experts' (GptOssExperts) has other parts" in said


def test_experts_that_cannot_be_rounded_are_named(tmp_path: Path) -> None:
    folder = save_model("qwen2_moe", tmp_path)  # experts of 24 channels
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.experts\.down_proj\[0\]'.*24.*'int8'"):
        load(folder, dtype="int4", device="cpu")
    model = load(folder, dtype="float32", device="cpu").model
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 3, 4] = torch.inf
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.experts\.gate_up_proj\[2\]'.*not finite"):
        round_weights(model, "int8", "m")
