"""Single tokens as text and bytes."""

from __future__ import annotations

import pytest

from foretoken.serve.token_text import Places, TokenText
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


def test_places_behind_what_the_tokenizer_has_added() -> None:
    places = Places(TokenText(SentencePiece()), skip_special=True)
    assert places.of_prompt([0, 2, 2], "the the") == [0, 0, 4]
    assert places.of_answer([2, 0, 2]) == [7, 11, 11]
    assert Places(TokenText(SentencePiece()), skip_special=False).of_answer([0, 2]) == [0, 3]
