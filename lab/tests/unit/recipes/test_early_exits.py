"""Training for early exits: dropped layers, chosen exits, and that the model is left as it was."""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.train.objectives import distance
from foretoken_lab.recipes.early_exits import EarlyExits

LAYERS = 4


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def tokens():
    return torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))


def next_token_loss(found):
    logits = found(input_ids=tokens(), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


def runs(found, objective, draws):
    """How often each layer's attention ran in so many calls."""
    counts = [0] * LAYERS

    def count(number):
        counts[number] += 1

    handles = [
        layer.self_attn.register_forward_hook(lambda *_, number=number: count(number))
        for number, layer in enumerate(found.model.layers)
    ]
    for seed in range(draws):
        objective(found, tokens(), torch.Generator().manual_seed(seed))
    for handle in handles:
        handle.remove()
    return counts


def test_without_exits_and_dropout_it_is_the_next_token_loss():
    found = model().train()
    loss = EarlyExits(dropout=0.0, exits=0.0)(found, tokens(), torch.Generator())
    torch.testing.assert_close(loss, next_token_loss(found))


def test_the_exits_loss_is_their_distance_to_the_last_layer():
    """With a rotation over all of three exits, each draw asks one; all three come up, and nothing else."""
    found = model().eval()
    with torch.no_grad():
        states = found(input_ids=tokens(), use_cache=False, output_hidden_states=True)
        last_NV = states.logits.flatten(0, 1)
        expected = {
            round(float(distance(last_NV, found.lm_head(found.model.norm(h)).flatten(0, 1), "kl")), 4)
            for h in states.hidden_states[1:LAYERS]
        }
    objective = EarlyExits(dropout=0.0, exits=1.0, rotation=LAYERS - 1)
    seen = {
        round(float(objective(found, tokens(), torch.Generator().manual_seed(seed)).detach()), 4) for seed in range(40)
    }
    assert len(expected) == LAYERS - 1
    assert seen == expected


def test_later_layers_are_dropped_more_often_and_only_in_training():
    objective = EarlyExits(dropout=0.6, exits=0.0)
    counts = runs(model().train(), objective, 300)
    assert counts[0] == 300  # 2^0 - 1
    assert counts[0] > counts[1] > counts[2] > counts[3]
    expected = 300 * (1 - 0.6)
    assert abs(counts[3] - expected) < 4 * (300 * 0.6 * 0.4) ** 0.5
    assert runs(model().eval(), objective, 5) == [5] * LAYERS


def test_dropped_layers_run_again_afterwards_and_after_an_error():
    found = model().train()
    before = next_token_loss(found)
    EarlyExits(dropout=1.0)(found, tokens(), torch.Generator().manual_seed(0))
    torch.testing.assert_close(next_token_loss(found), before)
    try:
        EarlyExits(dropout=1.0)(found, tokens() + 1000, torch.Generator().manual_seed(0))
    except IndexError:
        pass
    else:
        raise AssertionError("tokens beyond the vocabulary were embedded")
    torch.testing.assert_close(next_token_loss(found), before)
