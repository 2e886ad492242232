"""Losses and gradients against values computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.train.objectives import NextToken
from foretoken_lab.recipes.objectives import AnswersFirst, MaskedDiffusion, SkippedPositions
from helpers.threads import one_thread  # noqa: F401  (a fixture)

V = 7


MASK = V - 1


def logits(rows, seed, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, V, generator=generator, dtype=torch.float64)


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


@pytest.mark.parametrize("suffix", [0.0, 0.5, 1.0])
def test_only_masked_positions_count(suffix):
    tokens = blocks(32, 24)
    law = table(4)

    def spoilt(where):
        def change(seen):
            found = law(seen)
            found[where(seen)] = torch.tensor([50.0] + [0.0] * (V - 1))
            return found

        return change

    def loss(law):
        model = Fixed(law)
        return MaskedDiffusion(MASK, 8, suffix)(model, tokens, torch.Generator().manual_seed(1)), model

    plain, model = loss(law)
    [(seen, _)] = model.asked
    masked = seen == MASK
    assert torch.equal(seen[~masked], tokens[~masked])
    assert 0 < masked.sum() < masked.numel()
    assert torch.equal(plain, loss(spoilt(lambda seen: seen != MASK))[0])
    assert not torch.equal(plain, loss(spoilt(lambda seen: seen == MASK))[0])
    if suffix == 1.0:
        assert not masked[:, :-8].any()
    else:
        assert masked[:, :-8].any()


def test_the_masked_loss_by_hand():
    """At a share of one the loss is the mean cross-entropy of the window; the weight is one over its length."""
    tokens = blocks(200, 12)
    model = Fixed(table(5))
    found = MaskedDiffusion(MASK, 6, suffix=1.0)(model, tokens, generator := torch.Generator().manual_seed(2))
    [(seen, _)] = model.asked
    masked = seen == MASK
    draw = torch.rand(200, 4, generator=generator.manual_seed(2))
    width = ((draw[:, 1] * 5).long() + 2).double()
    share = torch.where(draw[:, 3] < 0.5, 1.0, draw[:, 2].clamp_min(1 / 6)).double()
    log_q = table(5)(seen).double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    expected = -((log_q * masked).sum(1) / (share * width)).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (masked.sum(1)[share == 1.0] == width[share == 1.0]).all()


@pytest.mark.statistical
@pytest.mark.parametrize("suffix", [0.0, 0.75, 1.0])
def test_a_uniform_predictor_loses_log_v_whatever_is_masked(suffix):
    """The weight 1/t makes the masked share drop out of the expectation."""
    objective = MaskedDiffusion(MASK, 32, suffix)
    generator = torch.Generator().manual_seed(0)
    model = Fixed(lambda seen: torch.zeros(*seen.shape, V))
    tokens = blocks(2000, 48)
    losses = torch.stack([objective(model, tokens, generator) for _ in range(20)])
    error = losses.std().item() / 20**0.5
    assert error < 0.02
    assert losses.mean().item() == pytest.approx(math.log(V), abs=4 * error)


LONGEST = 1000


def positions(count, length=64, **options):
    objective = SkippedPositions(LONGEST, **options)
    generator = torch.Generator().manual_seed(0)
    return [objective._positions(length, generator) for _ in range(count)]


def test_positions_rise_by_pieces_and_stay_below_the_longest():
    found = positions(2000)
    for each in found:
        steps = each[1:] - each[:-1]
        assert each[0] == 0
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= 3  # four pieces
        assert each[-1] < LONGEST
    assert max(int(each[-1]) for each in found) > 0.9 * LONGEST  # the far end is reached


def test_a_share_of_the_blocks_keeps_plain_positions():
    found = positions(2000)
    plain = sum(torch.equal(each, torch.arange(64)) for each in found)
    assert 2000 * 0.25 - 80 < plain < 2000 * 0.25 + 80  # four standard deviations
    assert all(torch.equal(each, torch.arange(64)) for each in positions(20, plain=1.0))


def test_tokens_before_a_skip_are_read_after_it():
    """The library, given positions alone, takes each skip for the beginning of another text."""
    torch.manual_seed(0)
    small = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **small, num_attention_heads=2))
    tokens = blocks(1, 20)
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % V
    kept = torch.arange(20)
    kept[10:] += 30
    states = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: states.append(output[0, 15]))
    objective = SkippedPositions(LONGEST, plain=0.0)
    objective._positions = lambda length, generator: kept
    for each in (tokens, other):
        objective(model, each, torch.Generator())
    assert (states[0] - states[1]).abs().max() > 1e-6


def test_skipped_positions_reach_the_model():
    tokens = blocks(3, 20)
    model = Fixed(table(6))
    loss = SkippedPositions(LONGEST, plain=0.0)(model, tokens, torch.Generator().manual_seed(3))
    [(_, options)] = model.asked
    assert options["position_ids"].shape == (3, 20)
    assert len({tuple(row) for row in options["position_ids"].tolist()}) == 3
    assert loss.item() == NextToken()(model, tokens, torch.Generator()).item()


def test_prompt_tokens_count_less_at_skipped_positions_too():
    tokens = blocks(3, 20)
    tokens[:, 5], tokens[:, 12] = USER, END
    model, counted = Fixed(table(6)), AnswersFirst([USER], [END], 0.0)
    loss = SkippedPositions(LONGEST, counted=counted)(model, tokens, torch.Generator().manual_seed(3))
    assert loss.item() == counted(model, tokens, torch.Generator()).item()
    assert loss.item() != NextToken()(model, tokens, torch.Generator()).item()


USER, ASSISTANT, END = 3, 4, 5


def answers_first(asked):
    return AnswersFirst([USER], [ASSISTANT, END], asked)


def test_prompt_tokens_count_in_their_share_and_answers_in_full():
    # a cut-off text, a question, an answer, the beginning of the next question
    block = torch.tensor([[6, 6, END, 0, USER, 1, 1, 1, END, ASSISTANT, 2, 2, END, USER, 1, 1]])
    counted = answers_first(0.0).weights(block, torch.Generator()) > 0
    asked = {5, 6, 7, 8, 14, 15}
    assert {place for place in range(16) if not counted[0, place]} == {0} | asked
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([answers_first(0.25).weights(block, generator)[0] > 0 for _ in range(2000)]).float().mean(0)
    for place in asked:
        assert drawn[place].item() == pytest.approx(0.25, abs=0.05)  # five standard deviations
    assert all(drawn[place] == 1 for place in set(range(1, 16)) - asked)


def test_every_token_that_counts_counts_the_same():
    plain = [0, 1, 2, 0, 1, 2, 0, 1]
    asked = [USER, 1, 1, 1, 1, END, ASSISTANT, 2]
    weights = answers_first(0.0).weights(torch.tensor([plain, asked]), torch.Generator())
    counted = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
    torch.testing.assert_close(weights, counted / 9.0)
    nothing = answers_first(0.0).weights(torch.tensor([[USER, 1, 1, 1]]), torch.Generator())
    assert nothing.sum() == 0  # and not a number


def test_without_markers_it_is_the_next_token_loss():
    tokens, model = blocks(3, 20), Fixed(table(6))
    found = AnswersFirst([], [])(model, tokens, torch.Generator())
    assert found.item() == pytest.approx(NextToken()(model, tokens, torch.Generator()).item(), rel=1e-6)


def test_the_weighted_loss_is_the_mean_over_what_counts():
    torch.manual_seed(0)
    small = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **small, num_attention_heads=2))
    tokens = torch.tensor([[USER, 1, END, ASSISTANT, 2, 0, END, 1]])
    logits = model(input_ids=tokens).logits[0]
    losses = nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    counted = [place - 1 for place in (3, 4, 5, 6, 7)]  # as ASSISTANT stands after END, nobody asks any more
    expected = losses[counted].mean()
    ours = answers_first(0.0)(model, tokens, torch.Generator())
    torch.testing.assert_close(ours, expected)
    found = torch.autograd.grad(ours, list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(expected, list(model.parameters())))
    model.config.model_type = "another"  # whose logits are not known to be the head's product alone
    torch.testing.assert_close(answers_first(0.0)(model, tokens, torch.Generator()), expected)
