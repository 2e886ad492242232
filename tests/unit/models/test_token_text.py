"""Single tokens as text and bytes."""

from __future__ import annotations

import pytest

from foretoken.models.token_text import TokenText
from foretoken.serve.token_places import Places
from helpers.zoo_llms import PROMPTS, base


@pytest.mark.parametrize("text", [*PROMPTS, "\t\n  x = 'é'\r\n", "🙂🙃 東京"])
def test_bytes_of_tokens_are_the_text(text: str) -> None:
    tokenizer = base().tokenizer
    token_text = TokenText(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [token_text(token) for token in ids]
    assert b"".join(raw for _, raw in pieces).decode() == text
    for shown, raw in pieces:
        assert shown == raw.decode("utf-8", "replace")


def test_special_tokens_and_rows_that_are_none() -> None:
    token_text = TokenText(base().tokenizer)
    assert token_text(5) == ("<|end|>", b"<|end|>")
    assert token_text(10**6) == ("", b"")


class SentencePiece:
    """A tokenizer with bytes as tokens of their own."""

    all_special_ids = (0,)

    def convert_ids_to_tokens(self, token: int) -> str:
        return ("<s>", "<0xC3>", "▁the")[token]

    def decode(self, ids: list[int], **_: object) -> str:
        return ("<s>", "�", "the")[ids[0]]


def test_bytes_of_other_tokenizers() -> None:
    token_text = TokenText(SentencePiece())
    assert token_text(1) == ("�", b"\xc3")
    assert token_text(2) == (" the", b" the")
    assert token_text(0) == ("<s>", b"<s>")


def test_places_after_tokens_added_by_the_tokenizer() -> None:
    places = Places(TokenText(SentencePiece()), skip_special=True)
    assert places.of_prompt([0, 2, 2], "the the") == [0, 0, 4]
    assert places.of_answer([2, 0, 2]) == [7, 11, 11]
    assert Places(TokenText(SentencePiece()), skip_special=False).of_answer([0, 2]) == [0, 3]


HALVES = "aé€🙂 ü"


def test_places_within_characters_of_several_tokens() -> None:
    """Bytes as tokens: each begins where its character does, and the next token begins after one character."""
    places = Places(TokenText(Bytes()), skip_special=True)
    starts = [place for place, character in enumerate(HALVES) for _ in character.encode()]
    raw = list(HALVES.encode())
    assert places.of_answer(raw) == starts
    assert places.of_answer(raw) == [len(HALVES) + place for place in starts]
    one_by_one = Places(TokenText(Bytes()), skip_special=True)  # as a stream has them
    assert [one_by_one.of_answer([token])[0] for token in raw] == starts


@pytest.mark.parametrize("cut", range(1, len(HALVES.encode())))
def test_places_after_a_prompt_that_ends_within_a_character(cut: int) -> None:
    """The prompt's text ends in U+FFFD there, and the answer begins with its own text, whatever the rest of it is."""
    raw = list(HALVES.encode())
    prompt = bytes(raw[:cut]).decode("utf-8", "replace")
    places = Places(TokenText(Bytes()), skip_special=True)
    assert places.of_prompt(raw[:cut], prompt) == [
        len(bytes(raw[:place]).decode("utf-8", "ignore")) for place in range(cut)
    ]
    assert places.of_answer(list(b"ab")) == [len(prompt), len(prompt) + 1]


class Bytes:
    """A tokenizer with the 256 bytes as tokens."""

    all_special_ids = ()

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token:02X}>"
