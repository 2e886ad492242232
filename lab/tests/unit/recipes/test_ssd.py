"""The scan of Mamba-2 against the recurrence that it computes, and against the library's own."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mamba2 import modeling_mamba2

from foretoken_lab.recipes import ssd
from foretoken_lab.recipes.ssd import chunk_scan, faster_scan, initialise
from helpers.threads import one_thread  # noqa: F401  (a fixture)

HEADS, WIDTH, STATES = 4, 3, 5
CHUNK = 8


def inputs(length, groups, rows=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length * 10 + groups)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return {
        "x": draw(rows, length, HEADS, WIDTH),
        "dt": draw(rows, length, HEADS),
        "A": -draw(HEADS).exp(),
        "B": draw(rows, length, groups, STATES),
        "C": draw(rows, length, groups, STATES),
        "D": draw(HEADS),
        "dt_bias": draw(HEADS),
        "initial_states": draw(rows, HEADS, WIDTH, STATES),
    }


def recurrence(x, dt, A, B, C, D=None, dt_bias=None, initial_states=None):
    """h = exp(dt A) h + dt B x, y = C h + D x, one position at a time."""
    rows, length, heads, width = x.shape
    per_group = heads // B.shape[2]
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias)
    B, C = B.repeat_interleave(per_group, 2), C.repeat_interleave(per_group, 2)
    h = torch.zeros(rows, heads, width, B.shape[3], dtype=x.dtype) if initial_states is None else initial_states
    y = []
    for t in range(length):
        kept = (dt[:, t] * A).exp()[:, :, None, None]
        h = kept * h + dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None, :]
        y.append((h * C[:, t, :, None, :]).sum(-1) + (0 if D is None else D[:, None] * x[:, t]))
    return torch.stack(y, 1), h


def scan(given, **options):
    positional = [given[name] for name in ("x", "dt", "A", "B", "C")]
    others = {name: value for name, value in given.items() if name not in ("x", "dt", "A", "B", "C")}
    return chunk_scan(*positional, chunk_size=CHUNK, dt_softplus=True, return_final_states=True, **others, **options)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 19, 32])
@pytest.mark.parametrize("carried", [False, True], ids=["from zero", "from a state"])
def test_values_and_gradients_are_those_of_the_recurrence(groups, length, carried):
    given = inputs(length, groups)
    if not carried:
        del given["initial_states"]
    ours = {name: value.clone().requires_grad_() for name, value in given.items()}
    theirs = {name: value.clone().requires_grad_() for name, value in given.items()}
    found, expected = scan(ours), recurrence(**theirs)
    weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).double() for part in expected]
    for results in (found, expected):
        sum((part * weight).sum() for part, weight in zip(results, weights, strict=True)).backward()
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-10, atol=1e-10)
    for name in given:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-8, atol=1e-10)


def test_without_the_parts_that_may_be_missing():
    given = {name: value for name, value in inputs(13, 1).items() if name in ("x", "dt", "A", "B", "C")}
    y, state = recurrence(**given)
    torch.testing.assert_close(scan(given)[0], y)
    positional = [given[name] for name in ("x", "dt", "A", "B", "C")]
    alone = chunk_scan(*positional, chunk_size=CHUNK, dt_softplus=True)
    torch.testing.assert_close(alone, y)
    torch.testing.assert_close(scan(given)[1], state)


def test_steps_are_kept_within_their_limits():
    given = inputs(9, 1)
    limited = {**given, "dt": given["dt"].clamp(-1.0, 0.5) - given["dt_bias"]}
    step = F.softplus(limited["dt"] + given["dt_bias"])
    found = scan(given, dt_limit=(float(step.min()), float(step.max())))[0]
    exact = F.softplus(given["dt"] + given["dt_bias"]).clamp(step.min(), step.max())
    undone = {**given, "dt": exact + torch.log(-torch.expm1(-exact)), "dt_bias": torch.zeros(HEADS).double()}
    torch.testing.assert_close(found, recurrence(**undone)[0])
    assert not torch.allclose(found, scan(given)[0])


def test_a_text_in_two_pieces_is_the_text():
    given = inputs(21, 2)
    whole, last = scan(given)
    pieces, state = [], given["initial_states"]
    for part in (slice(0, 10), slice(10, 21)):
        cut = {name: value[:, part] if value.ndim > 2 or name == "dt" else value for name, value in given.items()}
        y, state = scan({**cut, "initial_states": state})
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("length", [5, 16, 37])
@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_scan_of_the_library(length, groups):
    given = inputs(length, groups, dtype=torch.float32)
    positional = [given.pop(name) for name in ("x", "dt", "A", "B", "C")]
    options = {"chunk_size": CHUNK, "dt_softplus": True, "return_final_states": True, **given}
    library = modeling_mamba2.mamba2_chunk_scan
    for found, expected in zip(chunk_scan(*positional, **options), library(*positional, **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_half_precision_inputs_are_scanned_in_float32_under_autocast():
    given = {name: value.bfloat16() for name, value in inputs(20, 1).items()}
    expected, _ = recurrence(**{name: value.double() for name, value in given.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = scan(given)
    assert y.dtype == state.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=2e-2)


MODELS = {
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "bamba": {
        "attn_layer_indices": [1],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
}


def tiny(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=32, hidden_size=16, num_hidden_layers=2, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_with_it_until_that_is_undone(name, monkeypatch):
    calls = []
    monkeypatch.setattr(ssd, "chunk_scan", lambda *args, **options: calls.append(1) or chunk_scan(*args, **options))
    model = tiny(name)
    library = sys.modules[type(model).__module__].mamba2_chunk_scan
    tokens = torch.arange(70)[None] % 32  # longer than a chunk

    def loss_and_gradient():
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    plain = loss_and_gradient()
    assert not calls
    undo = faster_scan(model)
    ours = loss_and_gradient()
    assert len(calls) == (2 if name == "mamba2" else 1)
    undo()
    assert sys.modules[type(model).__module__].mamba2_chunk_scan is library
    again = loss_and_gradient()
    assert len(calls) == (2 if name == "mamba2" else 1)
    for found, same, expected in zip(ours, again, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert torch.equal(same, expected)


@pytest.mark.parametrize("name", MODELS)
def test_mixers_are_drawn_within_their_ranges(name):
    model = tiny(name)
    initialise(model)
    mixers = [module for module in model.modules() if hasattr(module, "dt_bias")]
    assert len(mixers) == (2 if name == "mamba2" else 1)
    for mixer in mixers:
        step, decay = F.softplus(mixer.dt_bias), mixer.A_log.exp()
        assert (step > 0.99e-3).all()
        assert (step < 0.101).all()
        assert (decay >= 1).all()
        assert (decay <= 16).all()
        assert len(set(step.tolist())) == len(set(decay.tolist())) == 4
        assert (mixer.D == 1).all()
        assert (mixer.conv1d.bias == 0).all()
        assert 0.25 < mixer.conv1d.weight.abs().max() <= 0.5  # kernels of four
    other = tiny(name)
    initialise(other, dt=(0.2, 0.3), decay=(20.0, 30.0))
    for mixer in (module for module in other.modules() if hasattr(module, "dt_bias")):
        assert (F.softplus(mixer.dt_bias) > 0.19).all()
        assert (mixer.A_log.exp() >= 19.9).all()
