"""Finding MLPs and experts in the library's models, trying them, and swapping them for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward.feed_forward import gated_mlps, routed_experts, swapped
from foretoken.models.load import load
from helpers.tiny_models import save_model
from helpers.zoo_llms import target

# family -> gated MLPs, layers with routed experts, whether their weights are renormalised
FOUND = {
    "llama": (3, 0, None),
    "phi3": (3, 0, None),
    "gemma2": (4, 0, None),
    "gpt2": (0, 0, None),
    "nemotron": (0, 0, None),
    "qwen3_moe": (0, 3, False),
    "olmoe": (0, 3, False),
    "mixtral": (0, 3, True),
    "qwen2_moe": (3, 3, False),
    "deepseek_v2": (3, 2, False),
    "deepseek_v3": (3, 2, True),
    "granitemoe": (0, 3, True),
}


@pytest.mark.parametrize("family", FOUND)
def test_feed_forward_layers_of_a_family_are_found(family, tmp_path):
    model = load(save_model(family, tmp_path)).model
    mlps, experts = gated_mlps(model), routed_experts(model)
    renormalised = {each.renormalised for each in experts}
    assert (len(mlps), len(experts)) == FOUND[family][:2]
    assert renormalised == ({FOUND[family][2]} if experts else set())
    assert [each.layer for each in experts] == sorted(each.layer for each in experts)


def test_the_routers_own_word_counts(tmp_path):
    model = load(save_model("qwen3_moe", tmp_path, norm_topk_prob=True)).model
    assert all(each.renormalised for each in routed_experts(model))


def test_experts_of_another_make_are_refused(tmp_path):
    """gpt_oss bounds its gate, and its experts have biases."""
    model = load(save_model("gpt_oss", tmp_path)).model
    with pytest.raises(UnsupportedArchitecture, match="experts compute something else"):
        routed_experts(model)


def test_an_mlp_that_only_looks_like_one_is_refused(tmp_path):
    """gemma3n cuts its gate at a quantile before the activation: same names, another formula."""
    pattern = {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]}
    model = load(save_model("gemma3n_text", tmp_path, **pattern)).model
    with pytest.raises(UnsupportedArchitecture, match="computes something else"):
        gated_mlps(model)


def test_experts_that_compute_something_else_are_refused(tmp_path):
    model = load(save_model("qwen3_moe", tmp_path)).model
    experts = model.model.layers[1].mlp.experts
    own = experts.forward
    experts.forward = lambda x, chosen, weights: 2 * own(x, chosen, weights)
    with pytest.raises(UnsupportedArchitecture, match=r"layer 1.*compute something else"):
        routed_experts(model)


def test_plain_weights_of_separate_joint_and_packed_projections(tmp_path: Path):
    assert target().native_decoder is None or gated_mlps(target().model)[0].plain_weights() is None
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    for family in ("llama", "phi3", "gemma2"):
        model = load(save_model(family, tmp_path / family)).model
        for mlp in gated_mlps(model):
            assert mlp.plain_weights() is None  # packed for the CPU
        plain = _unpacked(tmp_path / family)
        (mlp, *_) = gated_mlps(plain)
        gate, up, down = mlp.plain_weights()
        g, u = nn.functional.linear(x, *gate), nn.functional.linear(x, *up)
        torch.testing.assert_close(nn.functional.linear(mlp.act(g) * u, *down), mlp.dense(x))


def _unpacked(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_swaps_are_undone_on_exit_and_after_an_error():
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(2)
    before = inner(x), outer(x)

    def mine(x):
        return x

    with swapped({inner: mine, outer: mine}):
        assert torch.equal(inner(x), x)
        with swapped({inner: lambda x: 2 * x}):
            assert torch.equal(inner(x), 2 * x)
        assert torch.equal(inner(x), x)
    with pytest.raises(ZeroDivisionError), swapped({inner: mine}):
        raise ZeroDivisionError
    assert torch.equal(inner(x), before[0])
    assert torch.equal(outer(x), before[1])
    assert "forward" not in vars(inner) | vars(outer)
