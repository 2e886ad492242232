"""Which parameter is trained how, how fast, and that a stop changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.train.muon import Muon
from foretoken.train.optimiser import Optimiser, Rates
from helpers.threads import one_thread  # noqa: F401  (a fixture)

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": True}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
MODELS = {
    "llama": ("llama", {**SMALL, **ATTENTION}),
    "llama with its own head": ("llama", {**SMALL, **ATTENTION, "tie_word_embeddings": False}),
    "qwen3_moe": (
        "qwen3_moe",
        {**SMALL, **ATTENTION, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "mamba2": ("mamba2", {**SMALL, "num_heads": 2, "head_dim": 16, "state_size": 8, "n_groups": 1}),
}
# what the parameters of each are; all that is not named here is for AdamW, without decay
MATRICES = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "llama with its own head": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate.weight"),
    "mamba2": ("in_proj", "out_proj"),
}
DECAYED = {
    "llama": ("embed_tokens",),
    "llama with its own head": ("embed_tokens", "lm_head"),
    "qwen3_moe": ("embed_tokens", "experts.gate_up_proj", "experts.down_proj"),
    "mamba2": ("embeddings.weight",),
}


def build(name="llama"):
    model_type, options = MODELS[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options), dtype=torch.float32)


def groups(model, rates=None):
    """Names of the parameters by how they are trained: Muon, AdamW with decay, AdamW without."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {"muon": set(), "decayed": set(), "plain": set()}
    for optimiser in Optimiser(model, rates or Rates())._optimisers:
        for group in optimiser.param_groups:
            kind = "decayed" if group["weight_decay"] else "plain"
            kind = "muon" if isinstance(optimiser, Muon) else kind
            found[kind] |= {names[id(parameter)] for parameter in group["params"]}
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_goes_where_it_belongs(name):
    model = build(name)
    found = groups(model)
    everything = {each for each, _ in model.named_parameters()}
    assert set.union(*found.values()) == everything
    assert sum(map(len, found.values())) == len(everything)
    assert found["muon"] == {each for each in everything if any(part in each for part in MATRICES[name])}
    assert found["decayed"] == {each for each in everything if any(part in each for part in DECAYED[name])}
    parameters = dict(model.named_parameters())
    assert all(parameters[each].ndim == 2 for each in found["muon"])
    assert all("norm" in each or "mixer" in each for each in found["plain"])
    if name == "mamba2":
        assert {each.rpartition("mixer.")[2] for each in found["plain"] if "mixer." in each} >= {
            "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias",
        }  # fmt: skip
    if name == "qwen3_moe":
        assert parameters["model.layers.0.mlp.experts.gate_up_proj"].ndim == 3


def test_without_muon_the_matrices_go_to_adamw_with_decay():
    found = groups(build(), Rates(muon=None))
    assert not found["muon"]
    assert {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"} <= found["decayed"]


def test_a_bias_of_the_head_does_not_decay_and_frozen_parameters_stay_out():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    model.get_output_embeddings = lambda: model[2]
    model[1].weight.requires_grad_(False)
    found = groups(model)
    assert found == {"muon": set(), "decayed": {"0.weight", "2.weight"}, "plain": {"1.bias", "2.bias"}}


def test_a_model_of_matrices_alone():
    assert groups(nn.Linear(4, 4, bias=False)) == {"muon": {"weight"}, "decayed": set(), "plain": set()}


def test_the_schedule_rises_stays_and_falls_to_zero():
    rates = Rates(warmup=0.1, decay=0.4)
    points = [rates.at(step / 100) for step in range(101)]
    assert points[0] == 0.05  # the first step is not lost
    assert points[5] == pytest.approx(0.5)
    assert points[10:61] == [1.0] * 51
    assert points[80] == pytest.approx(0.5)
    assert points[100] == 0.0
    assert points[:11] == sorted(points[:11])
    assert points[60:] == sorted(points[60:], reverse=True)
    assert rates.at(1.5) == 0.0
    assert [Rates(warmup=0.0, decay=0.0).at(x) for x in (0.0, 0.5, 1.0)] == [1.0] * 3


def train(model, optimiser, steps, start=0):
    for step in range(start, start + steps):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step(0.5)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba2"])
def test_the_state_makes_a_round_trip(name):
    whole = build(name)
    optimiser = Optimiser(whole, Rates())
    train(whole, optimiser, 3)
    stored = {key: value.clone() for key, value in optimiser.tensors().items()}
    weights = {key: value.detach().clone() for key, value in whole.named_parameters()}
    train(whole, optimiser, 2, start=3)

    resumed, forgetful = build(name), build(name)
    for model, load in ((resumed, True), (forgetful, False)):
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(weights[key])
        optimiser = Optimiser(model, Rates())
        if load:
            optimiser.load(stored)
        train(model, optimiser, 2, start=3)
    expected = dict(whole.named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in resumed.named_parameters())
    assert not all(torch.equal(parameter, expected[key]) for key, parameter in forgetful.named_parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(bad):
    model = build()
    optimiser = Optimiser(model, Rates())
    train(model, optimiser, 1)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    state = optimiser.tensors()
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    model.model.norm.weight.grad[0] = bad
    assert not math.isfinite(optimiser.step(0.5))
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
    assert all(torch.equal(value, state[key]) for key, value in optimiser.tensors().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimiser, 1, start=1)  # the next good one moves them
    assert not torch.equal(model.model.norm.weight, before["model.norm.weight"])


def test_gradients_are_clipped_and_rates_followed():
    """AdamW's first step is the rate whatever the gradient, Muon's has the RMS of AdamW's: both follow the schedule."""
    moved = {}
    for progress in (0.5, 0.75, 1.0):
        model = build()
        optimiser = Optimiser(model, Rates(muon=1e-2, adamw=1e-2, weight_decay=0.0, warmup=0.0, decay=0.5))
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        (1e6 * model(input_ids=torch.arange(32)[None], labels=torch.arange(32)[None]).loss).backward()
        assert optimiser.step(progress) > 1e3
        moved[progress] = {
            key: (value.detach() - before[key]).square().mean().sqrt().item()
            for key, value in model.named_parameters()
            if "q_proj" in key or "norm" in key
        }
    for key, distance in moved[0.5].items():
        assert 1e-3 < distance < 2e-2
        assert moved[0.75][key] == pytest.approx(distance / 2, rel=0.05)
        assert moved[1.0][key] == 0.0
