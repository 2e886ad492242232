"""Nats a token of a text: the figure that transformers gives, window by window."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretoken.models.load import load
from foretoken_lab.tasks.reading import read
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, load_eager, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def ids(count):
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(("count", "window"), [(2, 16), (16, 16), (40, 16), (33, 16), (18, 16)])
def test_windows_are_read_apart_and_weigh_by_their_tokens(folder, count, window):
    text = ids(count)
    model = load_eager(folder)
    pieces = [torch.tensor(text[start : start + window]) for start in range(0, count, window)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    with torch.no_grad():
        losses = [F.cross_entropy(model(piece[None]).logits[0, :-1], piece[1:], reduction="sum") for piece in pieces]
    num_tokens = sum(len(piece) - 1 for piece in pieces)
    found = read(load(folder, device="cpu"), text, window)
    assert found.num_tokens == num_tokens
    assert found.nats == pytest.approx(float(sum(losses)) / num_tokens, rel=1e-5)
    if len(pieces) == 1:
        assert found.interval is None
    else:
        low, high = found.interval
        assert low < found.nats < high


def test_more_text_is_known_more_narrowly(folder):
    model = load(folder, device="cpu")
    (few_low, few_high), (many_low, many_high) = (read(model, ids(count), 16).interval for count in (64, 640))
    assert many_high - many_low < few_high - few_low
