"""The loss of a head that is unrolled over its own outputs, as it is when it drafts (drafting/feature_heads/unroll.py).

    loss = sum over s of 0.8^s mean over columns of -sum over kept tokens v of p(v) log q_s(v)   /  sum of 0.8^s

Paper: EAGLE-3, arXiv:2503.01840, section 3.2. Differs: p is neither renormalised over the kept tokens nor are columns
left out whose favourite is not kept, so that a position weighs by the mass that can be accepted.

Letters: B sequences, T positions, N rows, W width, K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from foretoken.drafting.feature_heads.state_head import TrainableHead
from foretoken.drafting.feature_heads.unroll import Unroll, unrolled
from foretoken.train.feature_heads.lessons import Lessons

DECAY = 0.8  # of a step's weight


class HeadObjective(Protocol):
    """The loss of a head over hidden states, called as :class:`foretoken.train.objectives.Objective` is.

    Args:
        lessons: gives states and laws.
        embedding_VW: where tokens are looked up.
        head_of: gives the rows that score, [K, W]; asked at every call, as they may be in training.
        steps: S, tokens that are drafted.
    """

    name: str

    def __init__(self, lessons: Lessons, embedding_VW: Tensor, head_of: Callable[[], Tensor], steps: int) -> None: ...

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor: ...


class Unrolled(HeadObjective):
    """The loss of all steps; 0 where a micro-batch has no position that counts.

    Attributes:
        unroll: what the head says from every column; another head brings another.
    """

    name = "unrolled_cross_entropy"
    unroll: Unroll = staticmethod(unrolled)

    def __init__(self, lessons: Lessons, embedding_VW: Tensor, head_of: Callable[[], Tensor], steps: int) -> None:
        self._lessons, self._embedding_VW, self._head_of, self._steps = lessons, embedding_VW, head_of, steps

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(model, TrainableHead)
        lesson = self._lessons(tokens_BT)
        head_KW = self._head_of()
        p_NK = lesson.target_NV.softmax(-1)
        if model.ids_K is not None:
            p_NK = p_NK[:, model.ids_K.to(p_NK.device)]
        row_BT = torch.full(lesson.used_BT.shape, -1, dtype=torch.int64, device=p_NK.device)
        row_BT[lesson.used_BT] = torch.arange(len(p_NK), device=p_NK.device)
        total, weights = p_NK.new_zeros(()), 0.0
        steps = self.unroll(model, lesson.states_BTF, lesson.tokens_BT, self._embedding_VW, self._steps)
        for step, rows in enumerate(steps):
            of_BT = row_BT[:, 1 + step :]  # row i + 1 + s is the law of x_{i+2+s}
            taken_BT = of_BT >= 0
            log_q_NK = (rows[taken_BT] @ head_KW.T).log_softmax(-1)
            count = max(1, len(log_q_NK))
            total = total - DECAY**step * (p_NK[of_BT[taken_BT]] * log_q_NK).sum() / count
            weights += DECAY**step
        return total / max(weights, 1.0)
