"""The text and the bytes of single tokens, for log-probabilities.

A token may end inside a character: the joined bytes of several tokens are valid text.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Container, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """Texts and bytes of a tokenizer's tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
    Attributes:
        special: tokens without text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)
        self._byte_of = _bytes_of_characters() if _is_byte_level(tokenizer) else None
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """Return the text (incomplete characters as U+FFFD) and the bytes of a token."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> tuple[str, bytes]:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a row of the table without a token
            return "", b""
        if token not in self.special:
            if self._byte_of is not None and all(character in self._byte_of for character in piece):
                raw = bytes(self._byte_of[character] for character in piece)
                return raw.decode("utf-8", "replace"), raw
            if match := _BYTE.fullmatch(piece):
                raw = bytes([int(match[1], 16)])
                return raw.decode("utf-8", "replace"), raw
            if piece.startswith("▁"):  # a SentencePiece token, decoded alone, would lose its space
                text = piece.replace("▁", " ")
                return text, text.encode("utf-8")
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, text.encode("utf-8")


class Places:
    """The character offsets of tokens in a text. A token that starts inside a character gets that character's offset.

    Args:
        token_text: the tokenizer's texts.
        skip_special: whether the answer's text omits special tokens.
    """

    def __init__(self, token_text: TokenText, skip_special: bool) -> None:
        self._token_text = token_text
        self._skip_special = skip_special
        self._at = 0
        self._characters = getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return the offsets of a prompt's tokens; the tokenizer may have added special tokens that the text does not
        have.
        """
        special = self._token_text.special
        added = {token for token in tokens if token in special and self._token_text(token)[0] not in text}
        found = self._next(tokens, added)
        self._at = len(text)
        self._characters.reset()
        return found

    def of_answer(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of the answer's next tokens."""
        return self._next(tokens, self._token_text.special if self._skip_special else ())

    def _next(self, tokens: Sequence[int], left_out: Container[int]) -> list[int]:
        found = []
        for token in tokens:
            found.append(self._at)
            if token not in left_out:
                self._at += len(self._characters.decode(self._token_text(token)[1]))
        return found


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return "ByteLevel" in {decoder.get("type"), *(each.get("type") for each in decoder.get("decoders", ()))}


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
