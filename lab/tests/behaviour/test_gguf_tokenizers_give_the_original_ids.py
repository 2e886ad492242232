"""Tokenizers out of GGUF files: the original's ids for any text, and llama.cpp's."""

from __future__ import annotations

import atexit
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")

from foretoken import zoo  # noqa: E402
from foretoken.core.errors import ModelError  # noqa: E402
from foretoken.models.gguf.container import GGUFFile  # noqa: E402
from foretoken.models.gguf.tokenizer import tokenizer_of  # noqa: E402
from foretoken_lab.peers.gguf import export  # noqa: E402
from helpers import gguf_files  # noqa: E402

TEXTS = (
    "Hello world 12345  foo\n\n  bar's IT'S   x = 3.14 # end\n",
    "ünïcödé 你好, мир! ﷺ ½ ² e\u0301 \u200b🤖🏽 don't DON'T",
    "\t\tif (a[i] != b) {\r\n  return 007;\r\n}   ",
    " leading, trailing ",
    "the Qzx is here",
    "fooWorld(12345);\n345/12 a\u0301 123345;\r\n",
    "<|user|>\nWhat is 2+2?<|end|>\n<|assistant|>\n",
    "",
    " ",
    "a" * 60 + "1" * 7,
)


Fields = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    """What the bundled draft's file says, with its byte-level tokenizer."""
    folder, path = zoo.path("draft"), tmp_path_factory.mktemp("gguf") / "draft.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    return GGUFFile(export(model, AutoTokenizer.from_pretrained(folder), path)).fields


@pytest.fixture(scope="module")
def richer(base: Fields) -> Fields:
    """With tokens that only some splits allow: digits together, a newline after a sign, a capital within a word.

    And with one that no merges lead to, which some take nevertheless.
    """
    pairs = [
        ("1", "2"),
        ("12", "3"),
        ("3", "4"),
        ("34", "5"),
        ("123", "345"),
        (";", "Ċ"),
        ("o", "W"),
        ("a", "Ì"),
        ("1", "/"),
    ]
    return {
        **base,
        "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"], *map("".join, pairs), "ĠQzx"],
        "tokenizer.ggml.token_type": [*base["tokenizer.ggml.token_type"], *[1] * len(pairs), 1],
        "tokenizer.ggml.merges": [*base["tokenizer.ggml.merges"], *map(" ".join, pairs)],
        "llama.vocab_size": len(base["tokenizer.ggml.tokens"]) + len(pairs) + 1,
    }


def with_fields(base: Fields, target: Path, **fields: Any) -> Path:
    """The vocabulary alone, with other fields under ``tokenizer.ggml.``."""
    named = {f"tokenizer.ggml.{key}" if "." not in key else key: value for key, value in fields.items()}
    return gguf_files.vocabulary(target, {**base, **named})


def tokenizer_at(path: Path) -> Any:
    return tokenizer_of(GGUFFile(path))


@contextmanager
def llama_cpp_of(path: Path) -> Iterator[Any]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra 'bench')")
    atexit.register(llama_cpp._utils.outnull_file.close)  # it leaves them open, which the interpreter reports at exit
    atexit.register(llama_cpp._utils.errnull_file.close)
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        yield llama
    finally:
        llama.close()


def test_the_originals_ids_and_words(base: Fields, tmp_path: Path) -> None:
    ours = tokenizer_at(with_fields(base, tmp_path / "x.gguf"))
    original = AutoTokenizer.from_pretrained(zoo.path("draft"))
    assert ours.get_vocab() == original.get_vocab()
    assert set(ours.all_special_ids) == set(original.all_special_ids)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)
    for text in TEXTS:
        ids = original(text).input_ids
        assert ours(text).input_ids == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "starcoder", "llama-bpe", "tekken", "qwen2"])
def test_every_split_is_llama_cpps(pre: str, richer: Fields, tmp_path: Path) -> None:
    """The same vocabulary and merges under every name: what differs is how text is cut."""
    path = with_fields(richer, tmp_path / "x.gguf", pre=pre)
    ours, found = tokenizer_at(path), []
    with llama_cpp_of(path) as llama:
        for text in TEXTS:
            if pre == "qwen2" and "\u0301" in text:  # Qwen composes accents, which llama.cpp leaves out
                text = unicodedata.normalize("NFC", text)
            found.append(ours(text, add_special_tokens=False).input_ids)
            assert found[-1] == llama.tokenize(text.encode(), add_bos=False, special=True), text
    assert len(set(map(tuple, found))) == len(TEXTS)


def test_splits_differ(richer: Fields, tmp_path: Path) -> None:
    names = ("gpt-2", "smollm", "llama-bpe", "tekken", "qwen2")
    found = [tokenizer_at(with_fields(richer, tmp_path / f"{name}.gguf", pre=name)) for name in names]
    ids = {tuple(tuple(each(text).input_ids) for text in TEXTS) for each in found}
    assert len(ids) == len(names)


def sentence_piece(base: Fields, target: Path, **fields: Any) -> Path:
    """A vocabulary of characters, bytes and some words, best scores first."""
    words = [
        "▁the",
        "▁t",
        "he",
        "▁he",
        "ll",
        "llo",
        "▁hello",
        "ello",
        "in",
        "▁w",
        "or",
        "ld",
        "orld",
        "▁▁",
        "▁▁▁▁",
        "er",
        "re",
    ]
    pieces = [*words, "▁", *"abcdefghijklmnopqrstuvwxyzHW.,é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|end|>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0]
    described = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "merges": None, "pre": None}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "eot_token_id": None, "padding_token_id": None}
    described["llama.vocab_size"] = len(tokens)
    return with_fields(base, target, **{**described, **ids, "add_bos_token": None, **fields})


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_piece_is_llama_cpps(prefixed: bool, base: Fields, tmp_path: Path) -> None:
    path = sentence_piece(base, tmp_path / "x.gguf", add_space_prefix=prefixed)
    ours = tokenizer_at(path)
    texts = ["hello the    world", "Hello, there. wé 你好\n<|end|>other the", " the", "hellohello  in"]
    with llama_cpp_of(path) as llama:
        for text in texts:
            ids = ours(text).input_ids
            assert ids == llama.tokenize(text.encode(), add_bos=True, special=True), text
            assert ids[0] == 1  # such a text begins with a token for it
            if "<|" not in text:
                assert ours.decode(ids, skip_special_tokens=True) == text
    assert ours("hello").input_ids[1:] == (
        [ours.get_vocab()["▁hello"]] if prefixed else ours.convert_tokens_to_ids(["he", "llo"])
    )


def test_what_a_file_says_of_beginnings_and_templates(base: Fields, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path = with_fields(
        base, tmp_path / "x.gguf", **{"add_bos_token": True, "add_eos_token": True, "tokenizer.chat_template": template}
    )
    ours = tokenizer_at(path)
    ids = ours("a").input_ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert ours("a", add_special_tokens=False).input_ids == ids[1:-1]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (
        tokenizer_at(with_fields(base, tmp_path / "y.gguf", pre="llama-bpe", add_bos_token=None))("a").input_ids[0] == 1
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "its tokenizer is of kind 'bert', which is not read: gpt2, llama are"),
        ({"model": None}, "it holds no tokenizer"),
        ({"tokens": None}, "it holds no tokenizer"),
        ({"pre": "viking"}, "splits text before merging as 'viking' does, which is not known here: gpt-2, smollm"),
        ({"pre": None}, r"does not say how text is split before merging \('tokenizer.ggml.pre'\)"),
        ({"merges": None}, r"its field 'tokenizer.ggml.merges' is missing"),
        ({"merges": ["zz qq"]}, "merges of its tokenizer name tokens that it does not have"),
        ({"token_type": [1, 1]}, "'tokenizer.ggml.token_type' has not one entry for each of its 8192 tokens"),
        ({"model": "llama"}, "'tokenizer.ggml.scores' is missing"),
        ({"bos_token_id": 8192}, "'tokenizer.ggml.bos_token_id' is 8192, of 8192 tokens"),
    ],
)
def test_tokenizers_that_are_refused(fields: dict[str, Any], message: str, base: Fields, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_at(with_fields(base, tmp_path / "x.gguf", **fields))
