"""The parts of a training step that are computed our own way: the same numbers and gradients as the library's."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from foretoken.forward.hidden_states import FINAL
from foretoken.train import attention, head_loss, processor
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.muon import Muon, orthogonalised
from foretoken.train.objectives import NextToken
from helpers.threads import one_thread  # noqa: F401  (a fixture)

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(**changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**LLAMA, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize("length", [2, 7, attention.BLOCK, attention.BLOCK + 1, 300])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_attention_and_its_gradients_are_those_of_the_formula(length, heads, groups):
    query = random(2, heads, length, 8, seed=1).double().requires_grad_()
    key, value = (random(2, groups, length, 8, seed=seed).double().requires_grad_() for seed in (2, 3))
    ours, _ = attention.attend(torch.nn.Module(), query, key, value, None, scaling=0.3)
    repeat = heads // groups
    reference = F.scaled_dot_product_attention(
        query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), is_causal=True, scale=0.3
    ).transpose(1, 2)
    weight = random(*reference.shape, seed=4).double()
    found = torch.autograd.grad((ours * weight).sum(), (query, key, value))
    expected = torch.autograd.grad((reference * weight).sum(), (query, key, value))
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(found, expected)


def test_a_model_trains_the_same_with_it():
    model, tokens = build(), torch.randint(0, 64, (2, 200), generator=torch.Generator().manual_seed(1))
    expected = gradients(model, model(input_ids=tokens, labels=tokens).loss)
    attention.use(model)
    assert model.config._attn_implementation == attention.NAME
    torch.testing.assert_close(gradients(model, model(input_ids=tokens, labels=tokens).loss), expected)


def test_a_model_trains_where_products_are_computed_in_bfloat16():
    """On every processor, whatever ``processor.products`` would choose there."""
    model, tokens = build(), torch.randint(0, 64, (2, 200), generator=torch.Generator().manual_seed(1))
    expected = gradients(model, NextToken()(model, tokens, torch.Generator()))
    attention.use(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = NextToken()(model, tokens, torch.Generator())
    for name, found in gradients(model, loss).items():
        assert found.dtype == torch.float32
        cosine = F.cosine_similarity(found.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.99, name


def test_attention_that_is_not_plainly_causal_uses_the_library():
    model = build()
    tokens, mask = torch.randint(0, 64, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0  # padding on the left
    expected = model(input_ids=tokens, attention_mask=mask).logits
    attention.use(model)
    torch.testing.assert_close(model(input_ids=tokens, attention_mask=mask).logits[mask > 0], expected[mask > 0])


def test_a_model_that_reads_both_ways_keeps_doing_so():
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = AutoConfig.for_model("modernbert", **{**LLAMA, **ends, "num_key_value_heads": None})
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa").eval()
    tokens = torch.randint(3, 64, (2, 20))
    expected = model(input_ids=tokens).logits
    attention.use(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)


# ------------------------------------------------------------------ loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_loss_in_pieces_is_the_loss(tied, rows, monkeypatch):
    monkeypatch.setattr(head_loss, "WIDER_ROWS", rows)
    monkeypatch.setattr(head_loss, "FLOATS", 3)
    model, tokens = build(tie_word_embeddings=tied), torch.randint(0, 64, (3, 12))
    ours = NextToken()(model, tokens, torch.Generator())
    logits = model(input_ids=tokens).logits
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradients(model, 0.25 * ours), gradients(model, 0.25 * plain))


def test_a_target_of_probability_0_has_a_finite_loss():
    """Its p is 0 in float32; the loss is the distance of its logit to the largest one."""
    model, tokens = build(), torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        model.lm_head.weight.mul_(4000)
    logits = model(input_ids=tokens).logits
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert plain > 200
    torch.testing.assert_close(NextToken()(model, tokens, torch.Generator()), plain)


def test_without_gradients_none_are_computed():
    model, tokens = build(), torch.randint(0, 64, (3, 12))
    with torch.no_grad():
        loss = NextToken()(model, tokens, torch.Generator())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, NextToken()(model, tokens, torch.Generator()).detach())


# ------------------------------------------------------------------ Muon


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_directions_get_nearly_equal_lengths(shape):
    values = torch.linalg.svdvals(orthogonalised(random(*shape)).float())
    assert 0.6 < values.min() <= values.max() < 1.3


def test_it_moves_as_torchs_muon_does():
    """Theirs iterates in bfloat16: equal to its precision, in the length and direction of every step."""
    weights = [torch.nn.Parameter(random(12, 20, seed=1)) for _ in range(2)]
    ours = Muon([weights[0]], lr=0.02, weight_decay=0.1, momentum=0.95)
    theirs = torch.optim.Muon([weights[1]], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    start = weights[0].detach().clone()
    for step in range(5):
        for weight, optimiser in zip(weights, (ours, theirs), strict=True):
            weight.grad = random(12, 20, seed=10 + step)
            optimiser.step()
    moved = [(weight.detach() - start).flatten() for weight in weights]
    assert F.cosine_similarity(moved[0], moved[1], dim=0) > 0.999
    assert moved[0].norm() == pytest.approx(float(moved[1].norm()), rel=0.01)


def test_a_matrix_without_a_gradient_stays():
    weight = torch.nn.Parameter(random(4, 4))
    before = weight.detach().clone()
    Muon([weight], lr=0.1, weight_decay=0.1, momentum=0.9).step()
    assert torch.equal(weight.detach(), before)


# ------------------------------------------------------------------ processor


@pytest.mark.parametrize(("speed", "expected"), [(0.5, torch.float32), (4.0, torch.bfloat16)])
def test_the_faster_dtype_is_taken(speed, expected, monkeypatch):
    monkeypatch.setattr(processor, "bfloat16_speed", lambda: speed)
    assert processor.product_dtype("cpu") == expected
    with processor.products(torch.device("cpu")):
        assert (random(4, 4) @ random(4, 4)).dtype == expected


def test_a_gpu_computes_in_bfloat16():
    assert processor.product_dtype("cuda") == torch.bfloat16


def test_tiny_numbers_become_zero_and_are_kept_again_afterwards():
    tiny = torch.tensor([1e-38])
    with processor.tiny_numbers_ignored():
        assert float(tiny * 1e-3) == 0.0
    assert math.isclose(float(tiny * 1e-3), 1e-41, rel_tol=0.01)


def test_the_loss_against_distributions_and_its_gradients(monkeypatch):
    """Of rows that share distributions, some of them with no weight, of distributions with a mass below one."""
    monkeypatch.setattr(head_loss, "ROWS", 4)
    torch.manual_seed(0)
    hidden, head = torch.randn(11, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    p, of, weights = torch.rand(5, 9) / 9, torch.randint(0, 5, (11,)), torch.rand(11) * (torch.arange(11) % 3 > 0)
    found = head_loss.law_loss(hidden, head, p, of, weights)
    expected = -((p[of] * (hidden @ head.T).log_softmax(-1)).sum(-1) * weights).sum()
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(3 * found, [hidden, head])
    theirs = torch.autograd.grad(3 * expected, [hidden, head])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_target_keeps_narrow_weights_where_products_are_narrow(dtype, monkeypatch):
    """Those of a bfloat16 checkpoint only; its states equal those of the whole model in float32, within rounding."""
    monkeypatch.setattr(processor, "bfloat16_speed", lambda: 4.0)
    model, tokens = build().to(dtype), torch.randint(0, 64, (3, 12))
    plain = deepcopy(model).float()
    target = FrozenTarget(model, (1,))
    assert target.parts.layers[0].mlp.up_proj.weight.dtype == dtype
    assert target.parts.embedding.weight.dtype == torch.float32
    with torch.no_grad():
        expected = plain(input_ids=tokens, output_hidden_states=True)
    states = target.states(tokens)
    torch.testing.assert_close(states[1], expected.hidden_states[1], rtol=2e-2, atol=2e-2)
    logits = target.logits(states[FINAL].flatten(0, 1))
    assert float((logits.view_as(expected.logits) - expected.logits).norm() / expected.logits.norm()) < 2e-2
