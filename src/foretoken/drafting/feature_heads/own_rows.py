"""The LM head of a draft network: rows of its own, or some of the target's.

Letters: M rows, D width, K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.drafting.draft_head import DraftHead


class OwnRows(DraftHead):
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
