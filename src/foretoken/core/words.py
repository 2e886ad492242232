"""Which tokens and which words may be written: two more filters of the distribution, as constraints.

What a path may go on with depends on its last tokens only, so a filter of words needs no history beyond the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.constraint import Constraint


class Words(Constraint):
    """Tokens that may be written, and sequences of tokens that may not: the last token of one is impossible where the
    others stand before it.

    Args:
        allowed_V: bool [V]: tokens that are ever possible, on the logits' device.
        forbidden: sequences of tokens; of the output, the prompt is not looked at.
    """

    def __init__(self, allowed_V: Tensor, forbidden: Sequence[Sequence[int]] = ()) -> None:
        self._allowed_V = allowed_V.clone()
        for word in forbidden:
            if len(word) == 1:
                self._allowed_V[word[0]] = False
        self._sequences = [tuple(word) for word in forbidden if len(word) > 1]
        self._reach = max(map(len, self._sequences), default=1) - 1  # tokens of the past that matter
        self._past: tuple[int, ...] = ()

    def allowed(self, path: Sequence[int]) -> Tensor:
        mask_V = self._allowed_V
        ends = self._ends((*self._past, *path))
        if ends:
            mask_V = mask_V.clone()
            mask_V[torch.tensor(ends, device=mask_V.device)] = False
        return mask_V

    def possible(self, path: Sequence[int]) -> bool:
        text = (*self._past, *path)
        begin = len(self._past)
        return all(
            bool(self._allowed_V[token]) and token not in self._ends(text[: begin + place])
            for place, token in enumerate(path)
        )

    def forced(self, limit: int) -> list[int]:
        return []

    def append(self, tokens: Sequence[int]) -> None:
        if self._reach:
            self._past = (*self._past, *tokens)[-self._reach :]

    def copy(self) -> Words:
        twin = Words.__new__(Words)
        twin.__dict__.update(self.__dict__)
        return twin

    def _ends(self, text: tuple[int, ...]) -> list[int]:
        """Tokens that would complete a forbidden sequence after a text."""
        return [word[-1] for word in self._sequences if text[-(len(word) - 1) :] == word[:-1]]


class Both(Constraint):
    """Two constraints at once: what both allow.

    Args:
        grammar: its forced tokens are drafted as far as the other takes them.
        words: the other.
    """

    def __init__(self, grammar: Constraint, words: Constraint) -> None:
        self._grammar = grammar
        self._words = words

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        first, second = self._grammar.allowed(path), self._words.allowed(path)
        return None if first is None or second is None else first & second

    def possible(self, path: Sequence[int]) -> bool:
        return self._grammar.possible(path) and self._words.possible(path)

    def forced(self, limit: int) -> list[int]:
        tokens = self._grammar.forced(limit)
        while tokens and not self._words.possible(tokens):
            tokens.pop()
        return tokens

    def append(self, tokens: Sequence[int]) -> None:
        self._grammar.append(tokens)
        self._words.append(tokens)

    def copy(self) -> Both:
        return Both(self._grammar.copy(), self._words.copy())
