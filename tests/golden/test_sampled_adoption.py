"""Large models are tried on some of their layers: every kind of layer is among them, and no fault gets past."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import attention
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models import language_model
from foretoken.models.adoption import fit, sample
from foretoken.models.adoption.sample import Sample, kinds, shortest_run
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.models.quantised.rounding import round_weights
from foretoken.native import build
from golden.test_native_families import FAULTS, Change
from helpers.golden import Session
from helpers.native_models import COMMON, FAMILIES, error, plain, text, twins
from helpers.tiny_models import load_eager, save_model

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

DEEP = 12


@pytest.fixture(autouse=True)
def every_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "_SMALL", 0)


def deep(kind: str = "llama", **options: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**COMMON, "num_hidden_layers": DEEP, **options})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()


def test_the_shortest_run_has_every_kind() -> None:
    assert shortest_run("aaaa") == (0, 1)
    assert shortest_run("aaaa", 2) == (0, 2)
    assert shortest_run("aaaaab") == (4, 6)
    assert shortest_run("abaacaab") == (1, 5)
    assert shortest_run("a", 2) == (0, 1)
    assert shortest_run("abcdefg") == (0, 7)


def test_layers_differ_by_everything_but_their_weights() -> None:
    model = deep()
    assert len(set(kinds(model))) == 1
    model.model.layers[3].self_attn.scaling *= 1.5
    model.model.layers[5].mlp.forward = lambda x: x
    model.model.layers[7].mlp.register_forward_hook(lambda module, args, output: None)
    model.model.layers[9].self_attn.register_buffer("factor", torch.tensor(2.0))
    model.model.layers[10].self_attn.register_buffer("factor", torch.tensor(3.0))
    found = kinds(model)
    assert [each for each in range(DEEP) if found[each] != found[0]] == [3, 5, 7, 9, 10]
    assert len(set(found)) == 6
    windows = deep("gemma3_text", sliding_window=21)  # five with a window, one without
    assert Sample(windows).span.last - Sample(windows).span.first == 2
    assert len(set(kinds(deep("smollm3", no_rope_layer_interval=4)))) == 2


def test_forwards_of_one_code_differ_by_enclosed_values() -> None:
    model = deep()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.forward = (lambda factor: lambda x: factor * x)(2.0 if index == 6 else 1.0)
    found = kinds(model)
    assert [each for each in range(DEEP) if found[each] != found[0]] == [6]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, "int8"], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken(family: str, dtype: torch.dtype | str, caplog: pytest.LogCaptureFixture) -> None:
    twin, reference = twins(family, dtype)
    with caplog.at_level(logging.DEBUG):
        model = LanguageModel(twin, None, name=family)
    assert model.native_decoder is not None, caplog.text
    assert "cannot be probed" not in caplog.text
    if dtype == torch.float32:
        session, tokens = Session(model), text(30)
        assert error(session.chunk(session.cache.acquire(), tokens), plain(reference, tokens)) < 1e-4


@pytest.mark.parametrize(("family", "layers"), [("mamba2", 6), ("qwen3_5_text", 8)])
def test_states_of_layers_that_do_not_run_stay_empty(family: str, layers: int, tmp_path: Path) -> None:
    """Of a trial's long chunk only the layers of the sample have states."""
    folder = save_model(family, tmp_path, num_hidden_layers=layers)
    model = load(folder, device="cpu")
    assert model.native_decoder is not None
    session, tokens = Session(model), text(30)
    assert error(session.chunk(session.cache.acquire(), tokens), plain(load_eager(folder), tokens)) < 1e-4


@pytest.mark.parametrize(("family", "fault", "change"), FAULTS, ids=[f"{each[0]}: {each[1]}" for each in FAULTS])
def test_a_forgotten_part_is_detected(
    family: str, fault: str, change: Change, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = fit.layout_of
    monkeypatch.setattr(fit, "layout_of", lambda *given: change(right(*given)))
    twin, _ = twins(family, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert LanguageModel(twin, None, name=family).native_decoder is None
    windows = fault == "windows of other layers"
    assert ("attends to a window" if windows else "other logits than the model's own modules") in caplog.text


def test_a_model_of_like_layers_runs_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda module, x: calls.append(1) or plain(module, x))
    counts = []
    for layers in (12, 4):
        calls.clear()
        assert LanguageModel(deep(num_hidden_layers=layers), None, name="deep").native_decoder is not None
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "change",
    [{"activation": "gelu_tanh"}, {"scaling": 1.5 * 32**-0.5}, {"residual_scale": 0.5}, {"norm_eps": 0.1}],
    ids=str,
)
def test_a_slip_is_found_despite_activations_of_8_bits(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = fit.layout_of
    monkeypatch.setattr(fit, "layout_of", lambda *arguments: replace(layout(*arguments), **change))
    model = deep()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.detach().normal_(0, 0.1)
    model.to(torch.bfloat16)
    round_weights(model, "int8", "deep")
    assert LanguageModel(model, None, name="deep").native_decoder is None
    assert "computes other logits than the model's own modules" in caplog.text


@pytest.mark.parametrize("kind", ["an attribute", "the index", "its parity"])
def test_a_fault_of_a_deep_layer_is_detected(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Queries, keys and values of layer 9 are 1.5 times what native code makes of them."""
    model = deep()
    cls = type(model.model.layers[0].self_attn)
    original = cls.forward

    def forward(module: Any, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        odd = {
            "an attribute": getattr(module, "odd", False),
            "the index": module.layer_idx >= 9,
            "its parity": module.layer_idx % 10 == 9,
        }[kind]
        return original(module, hidden_states * (1.5 if odd else 1.0), *args, **others)

    def by_attribute(module: Any, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        return original(module, hidden_states * (1.5 if module.odd else 1.0), *args, **others)

    for index, layer in enumerate(model.model.layers):
        layer.self_attn.odd = index == 9
    monkeypatch.setattr(cls, "forward", by_attribute if kind == "an attribute" else forward)
    with caplog.at_level(logging.WARNING):
        assert LanguageModel(model, None, name="odd").native_decoder is None
    assert "computes other logits than the model's own modules" in caplog.text


def test_a_slip_in_the_description_of_a_deep_layer_is_detected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = fit.layout_of

    def slipped(*given: Any) -> Any:
        layout = right(*given)
        blocks = list(layout.blocks)
        blocks[9] = replace(blocks[9], window=7)
        return replace(layout, blocks=blocks)

    monkeypatch.setattr(fit, "layout_of", slipped)
    with caplog.at_level(logging.WARNING):
        assert LanguageModel(deep(), None, name="slipped").native_decoder is None
    assert "layer 9 has window=7 there, and layer 0, of the same kind, 0" in caplog.text


def test_a_deep_layer_that_mixes_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    cls = type(model.model.layers[0].self_attn)
    original = cls.forward

    def forward(module: Any, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        if module.layer_idx == 9:
            hidden_states = hidden_states.roll(1, 1)
        return original(module, hidden_states, *args, **others)

    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(UnsupportedArchitecture, match="rows of a packed batch mix"):
        LanguageModel(model, None, name="mixing")


def test_a_native_product_that_is_another_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    round_weights(model, "int8", "deep")
    right = sample.packed_layer
    monkeypatch.setattr(
        sample,
        "packed_layer",
        lambda weight, bias, library: right(replace(weight, scale_OG=-weight.scale_OG), bias, library),
    )
    with pytest.raises(UnsupportedArchitecture, match=r"the native product with 'model\.layers\.0"):
        Sample(model)


def test_a_sample_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_COLUMNS", 10)
    model = deep(tie_word_embeddings=True)
    round_weights(model, "int4", "deep")
    monkeypatch.setattr(QuantisedWeight, "dense", lambda weight: pytest.fail("a whole matrix is expanded"))
    before = dict(model.named_modules())
    own = Sample(model)
    with own.running():
        assert model.lm_head(torch.ones(2, 96)).shape == (2, len(own.columns_C))
        assert type(model.model.layers[0].mlp.down_proj).__name__ == "TiledLinear"
        assert type(model.model.layers[2].mlp.down_proj).__name__ == "QuantisedLinear"
    after = dict(model.named_modules())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] and "forward" not in vars(after[name]) for name in before)
    assert all(type(layer.self_attn.layer_idx) is int for layer in model.model.layers)
