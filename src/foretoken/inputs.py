"""Prompts under vLLM's import names; a plain mapping with the same key works, too."""

from typing import TypedDict

import foretoken

__all__ = ["TextPrompt", "TokensPrompt"]


class TextPrompt(TypedDict):
    """A prompt as text.

    Attributes:
        prompt: the text; the tokenizer's own special tokens are added.
    """

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids.

    Attributes:
        prompt_token_ids: all of them, special tokens included.
    """

    prompt_token_ids: list[int]


__getattr__ = foretoken.__getattr__  # reports the replacement of other names
