"""Which tokens and which words may be written: two more filters of the distribution, as constraints.

What a path may go on with depends on its last tokens only, so a filter of words needs no history beyond the longest.
"""

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

    def copy(self) -> "Words":
        twin = Words.__new__(Words)
        twin.__dict__.update(self.__dict__)
        return twin

    def _ends(self, text: tuple[int, ...]) -> list[int]:
        """Tokens that would complete a forbidden sequence after a text."""
        return [word[-1] for word in self._sequences if text[-(len(word) - 1) :] == word[:-1]]


class Both(Constraint):
    """Two constraints at once. Tokens that one of them forces are drafted as far as the other allows them."""

    def __init__(self, first: Constraint, second: Constraint) -> None:
        self._first = first
        self._second = second

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        first, second = self._first.allowed(path), self._second.allowed(path)
        return None if first is None or second is None else first & second

    def possible(self, path: Sequence[int]) -> bool:
        return self._first.possible(path) and self._second.possible(path)

    def forced(self, limit: int) -> list[int]:
        tokens = self._first.forced(limit) or self._second.forced(limit)
        while tokens and not self.possible(tokens):
            tokens.pop()
        return tokens

    @property
    def idle(self) -> bool:
        return self._first.idle and self._second.idle

    def append(self, tokens: Sequence[int]) -> None:
        self._first.append(tokens)
        self._second.append(tokens)

    def copy(self) -> "Both":
        return Both(self._first.copy(), self._second.copy())
