"""The text and the bytes of single tokens.

A token may end inside a character: the joined bytes of several tokens are valid text.
"""

import json
import re
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
