"""Which tokens of a block are of replies, from the markers alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from foretoken import zoo
from foretoken.train.replies import Replies
from helpers.tiny_models import save_tokenizer

CHAT = "<|bos|><|user|>\nHi<|end|>\n<|assistant|>\nA cat<|end|>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(zoo.path("base"))


def predicted(tokenizer, text):
    """What the used positions predict."""
    tokens_T = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    [used_T] = Replies(tokenizer).used(tokens_T[None])
    assert not used_T[-1]
    return tokenizer.decode(tokens_T[1:][used_T[:-1]], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("block", "replies"),
    [
        (CHAT, "A cat<|end|>"),
        (CHAT + "<|user|>\nWhy?<|end|>\n<|assistant|>\nSo.<|end|>\n" + CHAT, "A cat<|end|>So.<|end|>A cat<|end|>"),
        ("<|bos|>A text.<|eos|>" + CHAT, "A text.<|eos|>A cat<|end|>"),
        ("<|bos|><|eos|>" + CHAT, "<|eos|>A cat<|end|>"),
        ("<|bos|><|user|>\nHi<|end|>\n<|assistant|>\nA cat", "A cat"),  # cut in the answer
        ("<|bos|><|user|>\nHi", ""),  # cut in the question
        ("<|bos|><|user|>\nHi<|end|>\n<|assistant|>", ""),
        (" black cat<|end|>\n" + CHAT, " cat<|end|>A cat<|end|>"),  # begins in an answer; nothing predicts its first
        (" black cat<|end|>\n<|user|>\nHi<|end|>\n", " cat<|end|>"),
        (" is it?<|end|>\n<|assistant|>\nA cat<|end|>\n", "A cat<|end|>"),  # begins in a question
        (" is it?<|end|>\n", ""),  # a turn of an unknown speaker
        (" and so on.<|eos|>" + CHAT, " so on.<|eos|>A cat<|end|>"),  # begins in a text
        (" and so on", " so on"),
        (" black cat" + CHAT, " catA cat<|end|>"),  # a reply that its length ended
        ("\n<|assistant|>\nA cat<|end|>\n", "A cat<|end|>"),
        ("<|bos|><|assistant|>\nHello.<|end|>\n<|user|>\nHi<|end|>\n", "Hello.<|end|>"),
    ],
)
def test_replies_of_a_block(tokenizer, block, replies):
    assert predicted(tokenizer, block) == replies


def test_rows_are_judged_one_by_one(tokenizer):
    rows = torch.tensor([tokenizer(CHAT, add_special_tokens=False)["input_ids"]] * 2)
    rows[1, 0] = rows[1, 1] = rows[1, 2]
    replies = Replies(tokenizer)
    used_BT = replies.used(rows)
    assert used_BT.dtype == torch.bool
    assert used_BT.shape == rows.shape
    for row, used_T in zip(rows, used_BT, strict=True):
        assert torch.equal(replies.used(row[None])[0], used_T)


def test_without_markers_all_positions_count(tmp_path):
    save_tokenizer(tmp_path)
    replies = Replies(AutoTokenizer.from_pretrained(tmp_path))
    assert not replies.known
    assert replies.used(torch.tensor([[5, 6, 7], [8, 9, 10]])).tolist() == 2 * [[True, True, False]]
