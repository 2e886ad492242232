"""Which tokens of a block are of replies, from the markers alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from foretoken import zoo
from foretoken.data.documents import chat
from foretoken.train.rendering import encoder
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


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<s>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>model\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} </s>{% else %}{{ raise_exception('no system') }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A tokenizer with <s> and </s> as its only markers."""
    folder = tmp_path_factory.mktemp("foreign")
    save_tokenizer(folder)
    made = AutoTokenizer.from_pretrained(folder)
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return made


@pytest.mark.parametrize("template", [CHATML, GEMMA, MISTRAL])
def test_replies_are_found_by_rendering(foreign, template):
    foreign.chat_template = template
    turns = [("user", "Who?"), ("assistant", "A cat.\nIt runs"), ("user", "Then?"), ("assistant", "So")]
    ids = [token for each in encoder(foreign)([chat(turns), chat(turns[:2])]) for token in each]
    answers = ["A cat.\nIt runs", "So", "A cat.\nIt runs"]
    assert [each.strip() for each in _found(foreign, ids)] == answers
    question = next(place for place in range(len(ids)) if foreign.decode(ids[place : place + 3]) == "en?")
    assert [each.strip() for each in _found(foreign, ids[question:])] == answers[1:]
    answer = next(place for place in range(len(ids)) if foreign.decode(ids[place : place + 3]) == "cat")
    assert [each.strip() for each in _found(foreign, ids[answer:])] == [answers[0][3:], *answers[1:]]
    assert foreign.chat_template is not None
    assert Replies(foreign).known


def _found(tokenizer, ids):
    """The predicted texts between two ends."""
    [used_T] = Replies(tokenizer).used(torch.tensor([ids]))
    text = tokenizer.decode(torch.tensor(ids)[1:][used_T[:-1]], skip_special_tokens=False)
    return [each for each in text.split("</s>") if each.strip()]
