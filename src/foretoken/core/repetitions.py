"""DRY, "don't repeat yourself": which tokens would lengthen a repetition, and their penalties.

Source:  https://github.com/oobabooga/text-generation-webui/pull/5677.

    text so far   a b c x a b |     "a b" was followed by c: c would lengthen a repetition of two tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.options.sampling import SamplingParams

_MOST = 1e4  # a penalty that leaves nothing of a token, and that float32 can be lowered by


class Repetitions:
    """The repetitions at the end of one request's text.

    Args:
        params: DRY's fields.
        prompt: token ids.
        breakers: tokens that no repetition goes across.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], breakers: frozenset[int]) -> None:
        self._params = params
        self._breakers = breakers
        self._last = params.dry_penalty_last_n if params.dry_penalty_last_n > 0 else None
        self._tokens: list[int] = []
        self.append(prompt)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether the parameters switch it on."""
        return params.dry_multiplier > 0 and params.dry_penalty_last_n != 0

    def copy(self) -> Repetitions:
        """Return an independent copy."""
        return Repetitions(self._params, self._tokens, self._breakers)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        self._tokens += tokens
        if self._last is not None:
            del self._tokens[: -self._last]

    def penalties(self, path: Sequence[int]) -> dict[int, float]:
        """Return the penalties on the logits of tokens after the text and a path of draft tokens."""
        params = self._params
        back = [*self._tokens, *path][: -self._last - 1 if self._last else None : -1]  # the last token first
        longest = next((place for place, token in enumerate(back) if token in self._breakers), len(back))
        found: dict[int, int] = {}
        for place, length in enumerate(_common_prefixes(back), start=1):
            length = min(length, longest)
            if length >= params.dry_allowed_length:
                token = back[place - 1]
                found[token] = max(length, found.get(token, 0))
        return {
            token: min(_MOST, params.dry_multiplier * _power(params.dry_base, length - params.dry_allowed_length))
            for token, length in found.items()
        }


def _power(base: float, exponent: int) -> float:
    return math.exp(min(exponent * math.log(base), 50.0))


def _common_prefixes(text: Sequence[int]) -> list[int]:
    """Return how long each suffix but the whole agrees with the beginning: the Z-algorithm, in linear time."""
    size = len(text)
    lengths = [0] * size
    left = right = 0
    for place in range(1, size):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < size and text[length] == text[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths[1:]
