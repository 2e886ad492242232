"""A drafter's own vocabulary: which tokens its head scores, as rows of logits and the ids that the rows stand for.

    hidden [M, D] ── score ── logits [M, K]    columns: the tokens that they stand for; none: all tokens

A drafter always proposes ids of the target, and q is a distribution over the whole vocabulary that is 0 outside of the
columns (core/columns.py). The acceptance rules do not change: a token with q = 0 can still be emitted, by a residual or
as the extra token. Rows of a model's own head are another thing (models/head_rows.py).

Letters: M rows, D width, K tokens that are scored, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor

from foretoken.core.columns import Columns


class DraftHead(Protocol):
    """Scores hidden states for a drafter.

    Attributes:
        vocab_size: V of the target.
        columns: the tokens that the logits stand for, increasing; None: column i is token i.
    """

    vocab_size: int
    columns: Columns | None

    @abstractmethod
    def score(self, hidden_MD: Tensor) -> Tensor:
        """Logits of its own tokens, float32 [M, K].

        Args:
            hidden_MD: [M, D], after the final norm.
        """
        ...
