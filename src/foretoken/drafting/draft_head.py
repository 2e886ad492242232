"""A drafter's own vocabulary: which tokens its head scores, as rows of logits and the ids that the rows stand for.

    hidden [M, D] ── score ── logits [M, K]    ids [K], increasing; none: all tokens
                              on_vocabulary ── [M, V], -inf at every other token

What a drafter proposes are always ids of the target, and q is a law over the whole vocabulary that is 0 outside of the
ids. Every rule stays what it is: a token with q = 0 can still be emitted, by a residual or as the extra token. Rows of
a model's own head are another thing (models/head_rows.py).

Letters: M rows, D width, K tokens that are scored, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class DraftHead(Protocol):
    """Scores hidden states for a drafter.

    Attributes:
        vocab_size: V, of the model whose tokens are drafted.
        ids_K: int64 [K], increasing: the token that each column of the logits stands for; None: column i is token i.
    """

    vocab_size: int
    ids_K: Tensor | None = None

    @abstractmethod
    def score(self, hidden_MD: Tensor) -> Tensor:
        """Logits of its own tokens, float32 [M, K].

        Args:
            hidden_MD: [M, D], behind the final norm.
        """
        ...

    @cached_property
    def _tokens(self) -> list[int] | None:
        return None if self.ids_K is None else self.ids_K.tolist()

    def tokens_of(self, columns: Sequence[int]) -> Sequence[int]:
        """The target's ids of columns of the logits: the one place where one becomes other."""
        tokens = self._tokens  # a look-up of a few in a list; as a tensor it took as long as half of the native call
        return columns if tokens is None else [tokens[column] for column in columns]

    def on_vocabulary(self, logits_MK: Tensor) -> Tensor:
        """The logits over all tokens, [M, V]: -inf at those that are not scored, so that their q is 0."""
        if self.ids_K is None:
            return logits_MK
        logits_MV = logits_MK.new_full((len(logits_MK), self.vocab_size), -torch.inf)
        return logits_MV.scatter_(1, self.ids_K.expand_as(logits_MK), logits_MK)
