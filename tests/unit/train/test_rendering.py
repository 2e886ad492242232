"""A model sees documents in its own chat format, and none of its special tokens that the data did not earn."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from foretoken import zoo
from foretoken.core.errors import InputError
from foretoken.data import documents as doc
from foretoken.train.rendering import beginning, encoder, has_markers
from helpers.tiny_models import save_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def own(tmp_path):
    """A tokenizer of characters with other special tokens, and no chat template yet."""
    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def zoo_tokenizer():
    return AutoTokenizer.from_pretrained(zoo.path("base"))


def rendered(tokenizer, document):
    [ids] = encoder(tokenizer)([document])
    return tokenizer.decode(ids, skip_special_tokens=False)


CHAT = doc.chat([("user", "Hi"), ("assistant", "Yo")])


def test_the_zoo_s_documents_are_the_zoo_s_tokens(zoo_tokenizer):
    assert has_markers(zoo_tokenizer)
    for document in (CHAT, doc.text("Once"), "cut off before <|end|>\n"):
        assert rendered(zoo_tokenizer, document) == document
    assert encoder(zoo_tokenizer)([]) == []


def test_another_tokenizer_gets_its_own_format(own):
    assert not has_markers(own)
    assert rendered(own, doc.text("Once")) == "<s>Once</s>"
    assert rendered(own, CHAT) == "Hi\nYo</s>"
    own.chat_template = TEMPLATE
    assert rendered(own, CHAT) == "<s>[user] Hi</s>[assistant] Yo</s>"
    assert rendered(own, doc.text("Once")) == "<s>Once</s>"
    assert encoder(own)([]) == []


def test_special_tokens_in_the_data_are_broken_up(own):
    own.chat_template = TEMPLATE
    [ids] = encoder(own)([doc.chat([("user", "a</s>[assistant] b<s>"), ("assistant", "<pad>")])])
    assert ids.count(own.eos_token_id) == 2
    assert ids.count(own.bos_token_id) == 1
    assert ids.count(own.pad_token_id) == 0
    assert rendered(own, doc.text("a</s>")) == "<s>a< /s></s>"
    [ids] = [own(own.apply_chat_template([{"role": "user", "content": "a</s>"}], tokenize=False))["input_ids"]]
    assert ids.count(own.eos_token_id) == 2  # without the breaking up it would be read as one


def test_what_a_model_wrote_in_its_own_format_stays_as_it_is(own):
    own.chat_template = TEMPLATE
    written = "<s>[user] Hi</s>[assistant] Yo</s>"
    assert rendered(own, written) == written


def test_the_beginning_of_an_answer(own, zoo_tokenizer):
    opening = CHAT.removesuffix("Yo<|end|>\n")
    assert beginning(opening, zoo_tokenizer) == opening
    assert beginning(opening, own) == "Hi\n"
    own.chat_template = TEMPLATE
    assert beginning(opening, own) == "<s>[user] Hi</s>[assistant] "
    assert beginning("<|bos|>Once upon", own) == "<s>Once upon"


def test_a_conversation_that_the_template_refuses(own):
    own.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(InputError, match=r"chat template refuses a conversation of the corpus \(System role not"):
        rendered(own, CHAT)
