"""Which models the native decoder takes over: plain ones, and only if they compute the same afterwards."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.forward import attention
from foretoken.forward.quantised_weight import QuantisedLinear, rounded
from foretoken.forward.stored_weight import StoredWeight
from foretoken.models.adoption import fit, native_trial
from foretoken.models.adoption import trial as library_trial
from foretoken.models.language_model import LanguageModel
from foretoken.models.quantised.rounding import round_weights
from foretoken.native import build
from helpers.golden import Session
from helpers.native_models import COMMON, error, plain, text
from helpers.stored_weights import random_stored

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")


def llama(**options: Any) -> Any:
    config = AutoConfig.for_model("llama", **{**COMMON, **options})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x


class Marked(nn.Parameter):
    """A parameter of a subclass, as quantised weights are."""


def a_subclass(model: Any) -> None:
    old = model.model.layers[1].self_attn.q_proj
    model.model.layers[1].self_attn.q_proj = new = Doubled(old.in_features, old.out_features, bias=False)
    new.load_state_dict(old.state_dict())


def a_forward_of_its_own(model: Any) -> None:
    linear = model.model.layers[1].mlp.down_proj
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight)


def a_parametrization(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[2].mlp.up_proj, "weight", Scaled())


def a_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def a_hook_before(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def a_parameter_of_another_class(model: Any) -> None:
    linear = model.model.layers[0].self_attn.v_proj
    linear.weight = Marked(linear.weight.detach())


def a_weight_of_another_dtype(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.double()


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (a_subclass, "'q_proj' of layer 1 is a Doubled"),
    (a_forward_of_its_own, "'model.layers.1.mlp.down_proj' (Linear) has a forward of its own"),
    (a_parametrization, "'up_proj' of layer 2 is a ParametrizedLinear"),
    (a_hook, "'model.layers.0.mlp' (LlamaMLP) has a hook"),
    (a_hook_before, "'model.norm' (LlamaRMSNorm) has a hook"),
    (a_parameter_of_another_class, "'v_proj' of layer 0 has a weight of type Marked"),
    (a_weight_of_another_dtype, "'o_proj' of layer 0 has weights of torch.float64"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[each.__name__ for each, _ in CHANGES])
def test_a_module_that_is_not_its_weight_makes_the_model_unfit(
    change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    change(model)
    assert reason in (fit.misfit(model) or "")
    with caplog.at_level(logging.WARNING):
        assert native_trial.adopt(model, 256, lambda batch, plan: pytest.fail("it must not be tried")) is None
    assert reason in caplog.text


class _Odd:
    """A Llama that is none inside: something happens between its plain modules."""

    def __init__(self, scale_from: int) -> None:
        self.scale_from = scale_from

    def apply(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(model.model.layers[0].self_attn)
        original = kind.forward

        def forward(module: Any, hidden_states: Tensor, position_embeddings: Any, **others: Any) -> Any:
            # scores grow with the position, as with Llama 4's temperature tuning
            positions = others["position_ids"][0]
            factor = 1 + 0.5 * (positions >= self.scale_from).float()[None, :, None]
            return original(module, hidden_states * factor, position_embeddings, **others)

        monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize("scale_from", [0, 100, 250])
def test_what_differs_after_packing_is_given_back_its_modules(
    scale_from: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(tie_word_embeddings=True, attention_bias=True)
    _Odd(scale_from).apply(model, monkeypatch)
    before = copy.deepcopy(model.state_dict())
    with caplog.at_level(logging.WARNING):
        loaded = LanguageModel(model, None, name="odd")
    assert loaded.native_decoder is None
    assert "computes other logits than the model's own modules" in caplog.text
    assert torch.equal(before["model.embed_tokens.weight"], model.model.embed_tokens.weight)


def wide(layers: int, width: float, seed: int) -> Any:
    """A Llama of matrices drawn so wide."""
    model = llama(num_hidden_layers=layers)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.detach().normal_(0, width, generator=generator)
    return model


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_model_in_which_roundings_grow_is_taken_all_the_same(dtype: str, seed: int) -> None:
    """Deep, or with scores in the hundreds: a last bit moves its logits by a quarter of their spread and more."""
    if dtype == "int8":
        model = wide(64, 0.3, seed)
        round_weights(model, dtype, "wide")
    else:
        model = wide(3, 1.0, seed).to(torch.bfloat16)
    assert LanguageModel(model, None, name="wide").native_decoder is not None


@pytest.mark.parametrize("change", [{"activation": "gelu_tanh"}, {"scaling": 1.5 * 32**-0.5}])
def test_a_slip_is_found_despite_activations_of_8_bits(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """0.27 and 0.53 of the spread, where rounding explains 0.15."""
    layout = fit.layout_of
    monkeypatch.setattr(fit, "layout_of", lambda *arguments: replace(layout(*arguments), **change))
    model = wide(6, 0.1, 0).to(torch.bfloat16)
    round_weights(model, "int8", "wide")
    assert LanguageModel(model, None, name="wide").native_decoder is None
    assert "computes other logits than the model's own modules" in caplog.text


def test_a_shift_that_all_logits_have_in_common_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    """One channel of the head adds a hundred times the tokens' difference: its rounding moves all logits together."""
    model = wide(3, 0.1, 0).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[:, 5] = 100.0
    round_weights(model, "int8", "shifted")
    with caplog.at_level(logging.WARNING):
        assert LanguageModel(model, None, name="shifted").native_decoder is not None, caplog.text
    ours_MV = torch.randn(12, 101)
    shifts_M1 = torch.arange(12.0)[:, None]
    assert native_trial.difference(ours_MV + shifts_M1, ours_MV) < 1e-4
    assert library_trial.difference(ours_MV + shifts_M1, ours_MV, torch.float32) is None
    assert "differ by" in (library_trial.difference(ours_MV * 1.01, ours_MV, torch.float32) or "")


def test_undoing_an_adoption_leaves_the_model_as_it_was() -> None:
    for options in ({"tie_word_embeddings": True, "attention_bias": True}, {}):
        model = llama(**options)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        tokens = text(20)
        expected = plain(model_of_library(model), tokens)
        fit.Adoption(model, 256).undo()
        assert fit.misfit(model) is None
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert torch.equal(plain(model_of_library(model), tokens), expected)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_undoing_an_adoption_gives_quantised_layers_back(dtype: str) -> None:
    model = llama(tie_word_embeddings=True, attention_bias=True)
    round_weights(model, dtype, "llama")
    before = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
    fit.Adoption(model, 256).undo()
    assert fit.misfit(model) is None
    after = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
    assert before.keys() == after.keys()
    for name, layer in before.items():
        ours, theirs = after[name].quantised, layer.quantised
        assert torch.equal(ours.codes_OK, theirs.codes_OK)
        assert ours.codes_OK.dtype == theirs.codes_OK.dtype
        assert torch.equal(ours.dense(), theirs.dense())
        assert (layer.bias is None) == (after[name].bias is None)


def test_projections_that_are_quantised_in_several_ways() -> None:
    """Queries, keys and values are packed apart, each as it is; next to dense ones they are left to their modules."""
    for q, k, fits in (((4, 32), (8, 16), True), ((8, None), (4, 32), True), ((4, 32), None, False)):
        model = llama()
        round_weights(model, "int4", "llama")
        attention = model.model.layers[1].self_attn
        dense = {name: getattr(attention, name).weight for name in ("q_proj", "k_proj")}
        for (name, weight_OK), scheme in zip(dense.items(), (q, k), strict=True):
            plain = nn.Linear(*reversed(weight_OK.shape), bias=False).requires_grad_(requires_grad=False)
            plain.weight.copy_(weight_OK)
            setattr(attention, name, plain if scheme is None else QuantisedLinear(rounded(weight_OK, *scheme)))
        expected = {name: getattr(attention, name).weight for name in dense}
        loaded = LanguageModel(model.eval(), None, name="mixed")
        assert (loaded.native_decoder is not None) == fits
        for name, weight_OK in expected.items():
            assert torch.equal(getattr(attention, name).weight, weight_OK)


def test_layers_in_the_blocks_of_a_file() -> None:
    """Values of another kind than queries and keys, as in most files, are packed apart; undoing gives blocks back."""
    model = llama(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    kinds = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "o_proj": "Q5_K"}
    kinds |= {"gate_proj": "Q4_K", "up_proj": "Q4_K", "down_proj": "Q3_K"}
    for path, linear in list(model.named_modules()):
        kind = kinds.get(path.rpartition(".")[2])
        if kind is not None:
            stored = random_stored(kind, linear.out_features, linear.in_features, seed=len(path), size=1e-4)
            model.set_submodule(path, QuantisedLinear(stored))
    before = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
    assert len(before) == 7 * len(model.model.layers)
    adoption = fit.Adoption(model, 256)
    for name, layer in before.items():
        x = torch.randn(5, layer.in_features)
        assert torch.equal(model.get_submodule(name)(x), layer(x))
    adoption.undo()
    for name, layer in before.items():
        after, stored = model.get_submodule(name).quantised, layer.quantised
        assert isinstance(after, StoredWeight)
        assert isinstance(stored, StoredWeight)
        assert torch.equal(after.blocks_OR, stored.blocks_OR)
    assert LanguageModel(model, None, name="stored").native_decoder is not None


def test_columns_in_an_order_of_their_own() -> None:
    """Rows are brought into it as they are coded; a gate and its other factor must have one order."""
    orders = [torch.randperm(96, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    for each, gate, up in (
        ((0, 0, 0), None, None),
        ((0, 1, 0), 1, 1),
        ((0, None, 0), None, None),
        ((0, 0, 0), 0, 1),
        ((0, 0, 0), 0, None),
    ):
        model = llama(tie_word_embeddings=True)
        round_weights(model, "int4", "llama")
        for layer in model.model.layers:
            for name, which in zip(("q_proj", "k_proj", "v_proj"), each, strict=True):
                linear = getattr(layer.self_attn, name)
                linear.quantised = replace(linear.quantised, order_K=None if which is None else orders[which])
            for linear, which in ((layer.mlp.gate_proj, gate), (layer.mlp.up_proj, up)):
                linear.quantised = replace(linear.quantised, order_K=None if which is None else orders[which])
            down = layer.mlp.down_proj
            down.quantised = replace(down.quantised, order_K=torch.arange(159, -1, -1))
        before = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
        if gate != up:
            assert "are quantised in ways that do not go together" in (fit.misfit(model) or "")
            continue
        x = {96: torch.randn(5, 96), 160: torch.randn(5, 160), 192: torch.randn(5, 192)}
        adoption = fit.Adoption(model, 256)
        for name, layer in before.items():
            packed, given = model.get_submodule(name), x[layer.in_features]
            assert torch.equal(packed.weight, layer.weight)
            assert torch.equal(packed(given), layer(given))
            assert torch.equal(packed(given.bfloat16()), layer(given.bfloat16()))
        adoption.undo()
        loaded = LanguageModel(model, None, name="ordered")
        assert loaded.native_decoder is not None


def model_of_library(model: Any) -> Any:
    """A twin that attends as the library does."""
    config = copy.deepcopy(model.config)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("positions", [2, 9, 40])
def test_a_model_of_few_positions_is_tried_too(positions: int) -> None:
    model = llama()
    loaded = LanguageModel(model, None, name="short", max_length=positions)
    assert loaded.native_decoder is not None
    session = Session(loaded)
    session.chunk(session.cache.acquire(), text(positions))


def test_an_unfilled_context_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary tables of a billion positions, which a damaged config may promise, would take 128 GB here."""
    reaches, read = [], native_trial.read

    def seen(forward: Any, cache: Any, reach: int, vocab: int) -> Tensor:
        reaches.append(reach)
        return read(forward, cache, min(reach, 256), vocab)

    monkeypatch.setattr(native_trial, "read", seen)
    assert LanguageModel(llama(max_position_embeddings=10**9), None, name="long").native_decoder is not None
    assert set(reaches) == {2**18}


def test_damaged_weights_do_not_count_against_the_decoder() -> None:
    """The engine reports them by their NaN logits, on either path."""
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3] = torch.nan
    assert LanguageModel(model, None, name="damaged").native_decoder is not None


def test_packed_modules_give_their_weight_back() -> None:
    model = llama(attention_bias=True)
    weights = {name: value.clone() for name, value in model.named_parameters() if "proj" in name}
    LanguageModel(model, None, name="packed")
    for name, value in weights.items():
        if name.endswith("weight"):
            assert torch.equal(model.get_submodule(name.removesuffix(".weight")).weight, value)


def test_a_product_over_packed_weights_refuses_other_rows() -> None:
    linear = fit.Adoption(llama(), 256)._model.model.layers[0].mlp.down_proj
    for x in (torch.zeros(2, 96), torch.zeros(2, 160, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="a product over packed weights takes"):
            linear(x)
    assert error(linear(torch.ones(1, 160)), linear.weight.sum(dim=1)) < 1e-5
