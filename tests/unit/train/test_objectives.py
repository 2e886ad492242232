"""Losses and gradients against values computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.train import objectives as module
from foretoken.train.objectives import DISTANCES, Distil, NextToken, distance
from helpers.threads import one_thread  # noqa: F401  (a fixture)

V = 7


def logits(rows, seed, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, V, generator=generator, dtype=torch.float64)


def by_hand(target, draft, name):
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (target.numpy(), draft.numpy()))
    overlap = np.minimum(p, q).sum(-1)
    return {
        "kl": (p * np.log(p / q)).sum(-1),
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "tv": np.abs(p - q).sum(-1) / 2,  # another form of 1 - sum min
        "neg_log_acceptance": -np.log(overlap),
    }[name].mean()


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_by_hand(name):
    target, draft = logits(50, 1), logits(50, 2)
    found = distance(target, draft, name).item()
    assert found == pytest.approx(by_hand(target, draft, name), rel=1e-12)
    others = [by_hand(target, draft, other) for other in DISTANCES if other != name]
    assert all(abs(found - other) > 0.01 for other in others)  # no two of them are the same


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distribution_has_no_distance_to_itself(name):
    same = logits(20, 3)
    assert distance(same, same + 5.0, name).item() == pytest.approx(0.0, abs=1e-12)  # a shift of logits is no change
    assert distance(same, same.roll(1, 1), name).item() > 0.1


def test_total_variation_is_one_minus_the_expected_acceptance():
    """Enumerated as the ratio test works: draw x from q, accept it with min(1, p(x)/q(x))."""
    target, draft = logits(20, 4), logits(20, 5)
    p, q = target.softmax(-1), draft.softmax(-1)
    accepted = (q * (p / q).clamp_max(1.0)).sum(-1).mean()
    assert distance(target, draft, "tv").item() == pytest.approx(1 - accepted.item(), abs=1e-12)


@pytest.mark.parametrize("name", DISTANCES)
def test_gradients(name):
    target = logits(4, 6)
    draft = logits(4, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda q: distance(target, q, name), draft)
    distance(target, draft, name).backward()
    step = draft.detach() - 0.1 * draft.grad
    assert distance(target, step, name) < distance(target, draft, name)


def test_hopeless_drafts_give_a_finite_loss():
    target, draft = torch.full((1, V), -200.0), torch.full((1, V), -200.0)
    target[0, 0] = draft[0, 1] = 200.0
    for name in DISTANCES:
        assert math.isfinite(distance(target, draft, name).item())


def test_an_unknown_distance():
    with pytest.raises(ValueError, match="'kll' is not one of kl, reverse_kl, tv, neg_log_acceptance"):
        distance(logits(1, 0), logits(1, 0), "kll")


class Fixed(nn.Module):
    """Gives the logits that a function makes of the tokens, and records its arguments."""

    def __init__(self, law):
        super().__init__()
        self.law, self.asked = law, []

    def forward(self, input_ids, **options):
        self.asked.append((input_ids, options))
        return SimpleNamespace(logits=self.law(input_ids))


def table(seed):
    rows = logits(V, seed).float()
    return lambda tokens: rows[tokens]


def blocks(rows, length, seed=0):
    return torch.randint(0, V - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_next_token_by_hand():
    tokens = blocks(3, 9)
    law = table(1)
    log_q = law(tokens).double().log_softmax(-1)
    expected = -np.mean([log_q[row, at, tokens[row, at + 1]] for row in range(3) for at in range(8)])
    assert NextToken()(Fixed(law), tokens, torch.Generator()).item() == pytest.approx(expected, rel=1e-5)


def test_distil_mixes_the_distance_at_a_temperature_with_the_next_token():
    tokens = blocks(3, 9)
    target, draft = table(1), table(2)
    plain = NextToken()(Fixed(draft), tokens, torch.Generator()).item()
    near = by_hand(target(tokens).flatten(0, 1).double() / 0.5, draft(tokens).flatten(0, 1).double() / 0.5, "tv")
    objective = Distil(Fixed(target), "tv", next_token=0.25, temperature=0.5)
    assert objective(Fixed(draft), tokens, torch.Generator()).item() == pytest.approx(0.75 * near + 0.25 * plain, 1e-5)
    assert objective.name == "tv"


def tiny(name="llama", **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(name, **sizes, **heads, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_the_teacher_is_not_trained():
    teacher, student = tiny(attention_dropout=0.5).train(), tiny()
    objective = Distil(teacher)
    tokens = blocks(2, 8)
    first, again = (objective(student, tokens, torch.Generator()) for _ in range(2))
    assert torch.equal(first, again)  # no dropout either
    first.backward()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize("next_token", [0.0, 0.25])
def test_rows_at_a_time_teach_what_whole_logits_do(next_token, monkeypatch):
    teacher, student = tiny(), tiny()
    torch.nn.init.normal_(teacher.lm_head.weight)
    tokens, found = blocks(3, 9), []
    monkeypatch.setattr(module, "ROWS", 5)
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(module.head_loss, "applies", lambda model: False)
        student.zero_grad()
        loss = Distil(teacher, "kl", next_token=next_token, temperature=0.7)(student, tokens, torch.Generator())
        loss.backward()
        found.append((loss.detach(), [parameter.grad.clone() for parameter in student.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", [NextToken(), Distil(Fixed(table(3)), "kl")])
def test_experts_are_balanced_in_training_and_not_judged_by_it(objective):
    model = tiny("qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
                 router_aux_loss_coef=0.3)  # fmt: skip
    tokens = blocks(2, 12)
    loss = {}
    for asked in (False, True):
        model.config.output_router_logits = asked
        for training in (False, True):
            with torch.no_grad():
                loss[asked, training] = objective(model.train(training), tokens, torch.Generator()).item()
    balance = model(input_ids=tokens, output_router_logits=True).aux_loss.item()
    assert balance > 0.5
    assert loss[True, True] == pytest.approx(loss[True, False] + 0.3 * balance, rel=1e-5)
    assert loss[True, False] == loss[False, False] == loss[False, True]
