"""Which tokens the columns of a table stand for, where a drafter scores some of the vocabulary only.

    column   0   1   2   3            logits, q [.., C]
    token    4  17  18 903            ids_C; everything else has the logit -inf and q = 0

A draft's tokens are always the target's ids. Everything that is drawn, filtered and subtracted stays C wide; a rule
that needs a whole row spreads it.

Letters: C columns, V vocabulary, N tokens.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Columns:
    """The tokens of C columns.

    Args:
        ids_C: int64, each token once, in any order.
        vocab_size: V.
    Raises:
        ValueError: there are none, or one is twice there or not in the vocabulary.
    """

    __slots__ = ("_column_V", "_tokens", "ids_C", "vocab_size")

    def __init__(self, ids_C: Tensor, vocab_size: int) -> None:
        if not len(ids_C) or int(ids_C.min()) < 0 or int(ids_C.max()) >= vocab_size:
            raise ValueError(f"columns stand for tokens from 0 to {vocab_size - 1}, at least one, not {ids_C.tolist()}")
        self.ids_C = ids_C
        self.vocab_size = vocab_size
        own_C = torch.arange(len(ids_C), dtype=torch.int32, device=ids_C.device)
        self._column_V = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids_C.device)
        self._column_V[ids_C] = own_C
        if not torch.equal(self._column_V[ids_C], own_C):
            raise ValueError("columns stand for different tokens, but two are for the same one")
        self._tokens: list[int] | None = None

    def __len__(self) -> int:
        return len(self.ids_C)

    def __contains__(self, token: int) -> bool:
        return self.of(token) >= 0

    def of(self, token: int) -> int:
        """The column of a token; -1 where it has none."""
        return int(self._column_V[token])

    def tokens_of(self, columns: Iterable[int]) -> list[int]:
        """The tokens of a few columns; looked up in a list, which takes a tenth of what a tensor takes."""
        if self._tokens is None:
            self._tokens = self.ids_C.tolist()
        tokens = self._tokens
        return [tokens[column] for column in columns]

    def of_tokens(self, tokens_N: Tensor) -> Tensor:
        """The columns of tokens, int64 [N]; -1 where one has none."""
        return self._column_V[tokens_N.to(self._column_V.device)].long()

    def found(self, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens, those that have columns: which of the N they are, and their columns; int64 both."""
        columns_N = self.of_tokens(tokens_N)
        which = (columns_N >= 0).nonzero()[:, 0]
        return which, columns_N[which]

    def spread(self, rows: Tensor, outside: float = 0.0) -> Tensor:
        """[.., C] -> [.., V]

        Args:
            outside: what every other token gets.
        """
        spread = rows.new_full((*rows.shape[:-1], self.vocab_size), outside)
        spread[..., self.ids_C] = rows
        return spread
