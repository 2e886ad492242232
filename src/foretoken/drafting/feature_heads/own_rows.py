"""The LM head of a draft network, rows of its own or some of the target's: which tokens it scores.

    hidden [M, D] ── score ── logits [M, K]    columns: the tokens that they stand for; none: all tokens

A drafter always proposes ids of the target, and q is a distribution over the whole vocabulary that is 0 outside of the
columns (core/columns.py). The acceptance rules do not change: a token with q = 0 can still be emitted, by a residual or
as the extra token. Rows of a model's own head are another thing (models/head_rows.py).

Letters: M rows, D width, K tokens that are scored, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

from foretoken.core.columns import Columns


class OwnRows:
    """Scores tokens by a product with these rows; nothing else is done to the logits.

    Args:
        weight_KW: the rows.
        ids_K: the tokens that they stand for, increasing; None: all.
        vocab_size: V.
    """

    def __init__(self, weight_KW: Tensor, ids_K: Tensor | None, vocab_size: int) -> None:
        self.weight_KW, self.vocab_size = weight_KW, vocab_size
        self.columns = None if ids_K is None else Columns(ids_K, vocab_size)

    def score(self, hidden_MD: Tensor) -> Tensor:
        return F.linear(hidden_MD.to(self.weight_KW.dtype), self.weight_KW).float()
