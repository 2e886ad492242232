"""The offsets of tokens in a text, for log-probabilities."""

from codecs import getincrementaldecoder
from collections.abc import Container, Sequence

from foretoken.models.token_text import TokenText


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
