"""A completion's text continues its prompt: no space between the two is lost, whatever a tokenizer does at a start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.engine.text.detokenise import TextStream, text_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model

TEXTS = ["the cat sat on the mat", "a dog and a cat", "on and on it ran", "the end"] * 8
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


def metaspace() -> Tokenizer:
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False))
    return inner


def of_llama() -> Tokenizer:
    """Normalised instead of split, bytes as a last resort, and a decoder that strips one space at the start."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    bytes_of = [f"<0x{value:02X}>" for value in "é東".encode()]
    trainer = trainers.BpeTrainer(vocab_size=70, special_tokens=[*SPECIAL, *bytes_of], show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    return inner


def of_bytes() -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False))
    return inner


KINDS: dict[str, Callable[[], Tokenizer]] = {each.__name__: each for each in (metaspace, of_llama, of_bytes)}


def wrapped(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


TOKENIZERS = {kind: wrapped(kind) for kind in KINDS}
kinds = pytest.mark.parametrize("kind", KINDS)


def whole(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    text, released = TextStream(tokenizer, prompt=prompt), ""
    for token in ids:
        text.push(token)
        released += text.release()
    text.close()
    return released + text.release(final=True)


@kinds
def test_a_word_after_a_prompt_keeps_its_space(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, both = (tokenizer(text)["input_ids"] for text in ("the cat", "the cat sat on"))
    assert both[: len(prompt)] == prompt
    ids = both[len(prompt) :]
    assert text_of(tokenizer, ids, prompt) == " sat on"
    assert streamed(tokenizer, prompt, ids) == " sat on"


@kinds
def test_without_text_before_it_nothing_changes(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer("sat on")["input_ids"]
    for prompt in ([], [1], [1, 3, 2]):
        assert text_of(tokenizer, ids, prompt) == streamed(tokenizer, prompt, ids) == "sat on"


def test_a_prompt_that_ends_within_a_character_is_no_context() -> None:
    tokenizer = TOKENIZERS["of_llama"]
    first, *others = tokenizer.convert_tokens_to_ids([f"<0x{value:02X}>" for value in "東".encode()])
    ids = [*others, *tokenizer("the cat")["input_ids"]]
    assert text_of(tokenizer, ids, [first]) == whole(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prompt_and_completion_add_up(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    plain = st.lists(st.sampled_from(range(10, len(tokenizer))), max_size=12)
    prompt = [*data.draw(plain), *tokenizer(" the")["input_ids"]]
    ids = data.draw(plain)
    expected = whole(tokenizer, prompt + ids)
    assert whole(tokenizer, prompt) + text_of(tokenizer, ids, prompt) == expected
    assert whole(tokenizer, prompt) + streamed(tokenizer, prompt, ids) == expected


@pytest.mark.parametrize("kind", ["metaspace", "of_llama"])
def test_generate_and_stream_keep_the_space(kind: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    tokenizer = TOKENIZERS[kind]
    assert len(tokenizer) <= VOCAB_SIZE
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu", speculative_config=None)
    space = next(index for index in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(index) == "▁the")
    params = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={space: 100.0})
    (output,) = llm.generate("a dog", params)
    assert output.text == " the the the"
    assert "".join(chunk.text for chunk in llm.stream("a dog", params)) == " the the the"
    stopped = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={space: 100.0}, stop="he t")
    assert llm.generate("a dog", stopped)[0].text == " t"
