"""The tokenizer that a recipe learns: digits alone, special tokens in their order, the zoo's chat template."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from foretoken import zoo
from foretoken.core.errors import InputError
from foretoken.data import documents as doc
from foretoken.train.mixture import Source
from foretoken.train.rendering import has_markers
from foretoken_lab.recipes.tokenizer import CHAT_TEMPLATE, SPECIAL, train_tokenizer

TEXT = "The year 1984 was followed by the year 1985, and 12345 people counted from 1984 to 1985. "
DOCUMENTS = [doc.text(TEXT * 5), doc.exchange("How many people counted?", "12345 people counted.")] * 10


def source(name="a", share=1.0, documents=DOCUMENTS):
    return Source(name, share, lambda: iter(documents))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([source()], 400)


def test_digits_stay_single(tokenizer):
    assert tokenizer.tokenize("1984 12345") == [*"1984", "Ġ", *"12345"]
    vocabulary = tokenizer.get_vocab()
    assert not any(len(token) > 1 and any(letter.isdigit() for letter in token) for token in vocabulary)
    assert any(len(token) > 4 for token in vocabulary if token not in SPECIAL)  # words are learnt


def test_special_tokens_have_their_ids_in_order(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(range(7))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.mask_token_id == 6
    assert has_markers(tokenizer)
    ids = tokenizer(doc.exchange("Hi", "Yo"), add_special_tokens=False)["input_ids"]
    assert [token for token in ids if token < 7] == [1, 3, 5, 4, 5]
    assert tokenizer(doc.text(doc.plain("<|end|>")), add_special_tokens=False)["input_ids"].count(5) == 0


def test_every_text_survives(tokenizer):
    for text in ("Zürich, 東京 🙂\n\ttab", "  spaces  ", "\x00\x7f", TEXT):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert max(ids) < len(tokenizer) <= 400


def test_the_chat_template_is_the_zoo_s(tokenizer, tmp_path):
    bundled = AutoTokenizer.from_pretrained(zoo.path("base"))
    assert bundled.chat_template == tokenizer.chat_template == CHAT_TEMPLATE
    turns = [("user", "Hi"), ("assistant", "Yo"), ("user", "So?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == doc.chat(turns)
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == doc.chat(turns) + "<|assistant|>\n"
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.mask_token_id == 6


def test_learning_is_deterministic(tokenizer):
    assert train_tokenizer([source()], 400).get_vocab() == tokenizer.get_vocab()
    assert train_tokenizer([source()], 300).get_vocab() != tokenizer.get_vocab()


def test_sources_are_sampled_in_their_shares():
    """A source without end is read as far as its share goes."""
    read = {"a": 0, "b": 0}

    def endless(name):
        def documents():
            while True:
                read[name] += 100
                yield name * 100

        return Source(name, {"a": 3.0, "b": 1.0}[name], documents)

    train_tokenizer([endless("a"), endless("b")], 300, sample=40_000)
    assert read == {"a": 30_000, "b": 10_000}


@pytest.mark.parametrize("documents", [[], [""]])
def test_nothing_to_learn_from(documents):
    with pytest.raises(InputError, match="no text to learn a tokenizer from"):
        train_tokenizer([source(documents=documents)], 300)
