"""The loss of a network that is unrolled over its own outputs, as in drafting (drafting/feature_heads/unroll.py).

    loss = sum over s of 0.8^s mean over columns of -sum over kept tokens v of p(v) log q_s(v)   /  sum of 0.8^s

Paper: EAGLE-3, arXiv:2503.01840, section 3.2. Differs: p is not renormalised over the kept tokens, and no column is
left out because its best token is not kept, so that a position weighs by the mass that can be accepted. Columns are
those from which serving drafts: pairs with a next token in a reply.

Letters: B sequences, T positions, N rows, W width, K draft vocabulary, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.drafting.feature_heads.unroll import Unroll, unrolled
from foretoken.train.feature_heads.batches import Batches
from foretoken.train.head_loss import law_loss

DECAY = 0.8  # of a step's weight
ROUND = 64  # columns


class HeadObjective(Protocol):
    """The loss of a draft network, called as :class:`foretoken.train.objectives.Objective` is.

    Args:
        batches: states and the target's distributions.
        embedding_VW: where tokens are looked up.
        lm_head: returns the rows that score, [K, W]; called every time, because they may be trained.
        steps: S, tokens that are drafted.
    Attributes:
        name: for the record.
        later: one column in so many is unrolled beyond its first step.
    """

    name: str
    later: int = 1

    def __init__(self, batches: Batches, embedding_VW: Tensor, lm_head: Callable[[], Tensor], steps: int) -> None: ...

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor: ...


class Unrolled(HeadObjective):
    """The loss of all steps; 0 where a micro-batch has no position that counts.

    Attributes:
        unroll: the network's output at every column.
    """

    name = "unrolled_cross_entropy"
    unroll: Unroll = staticmethod(unrolled)

    def __init__(self, batches: Batches, embedding_VW: Tensor, lm_head: Callable[[], Tensor], steps: int) -> None:
        self._batches, self._embedding_VW, self._lm_head, self._steps = batches, embedding_VW, lm_head, steps

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(model, TrainableNetwork)
        batch = self._batches(tokens_BT)
        p_NK = batch.p_NK(model.ids_K)
        row_BT = torch.full(batch.used_BT.shape, -1, dtype=torch.int64, device=p_NK.device)
        row_BT[batch.used_BT] = torch.arange(len(p_NK), device=p_NK.device)
        # serving drafts only where the next token is of a reply, never within a prompt
        wanted_BC = rounded_up(batch.used_BT[:, 1:])
        sequence_N, column_N = wanted_BC.nonzero(as_tuple=True)
        drafted_N = batch.used_BT[sequence_N, column_N + 1]
        later_BC = None if self.later == 1 else self._some(wanted_BC, generator)
        thinned = {} if later_BC is None else {"later_BC": later_BC}
        read = (model, batch.states_BTF, batch.tokens_BT, self._embedding_VW, self._steps, wanted_BC)
        steps = self.unroll(*read, **thinned)
        rows, targets, shares, weights = [], [], [], 0.0
        for step, rows_NW in enumerate(steps):
            if step == 1 and later_BC is not None:
                sequence_N, column_N = later_BC.nonzero(as_tuple=True)
                drafted_N = batch.used_BT[sequence_N, column_N + 1]
            place_N = column_N + 1 + step  # the row that predicts x_{i+2+s}
            of_N = row_BT[sequence_N, place_N.clamp_max(row_BT.shape[1] - 1)]
            counts_N = drafted_N & (of_N >= 0) & (place_N < row_BT.shape[1])
            rows.append(rows_NW)
            targets.append(torch.where(counts_N, of_N, 0))
            shares.append(counts_N * (DECAY**step / counts_N.sum().clamp_min(1)))
            weights += DECAY**step
        if not len(p_NK) or not rows:
            return sum((each.sum() for each in rows), p_NK.new_zeros(())) * 0.0
        return law_loss(torch.cat(rows), self._lm_head(), p_NK, torch.cat(targets), torch.cat(shares)) / weights

    def _some(self, wanted_BC: Tensor, generator: torch.Generator) -> Tensor:
        """One in so many of the wanted columns, about as many of each sequence."""
        first_B1 = torch.randint(self.later, (len(wanted_BC), 1), generator=generator).to(wanted_BC.device)
        return wanted_BC & ((wanted_BC.cumsum(1) + first_B1) % self.later == 0)


class Thinned(Unrolled):
    """The same loss in less time: a step costs as much as the first, and teaches less."""

    later = 2


def rounded_up(wanted_BC: Tensor) -> Tensor:
    """Some more columns, so that every sequence has one of few numbers of them: libraries prepare for every number.

    Returns:
        bool [B, C]; a multiple of ``ROUND`` columns of each sequence, all of them, or none.
    """
    count_B1 = wanted_BC.sum(1, keepdim=True)
    missing_B1 = -count_B1 % ROUND
    return wanted_BC | (~wanted_BC & ((~wanted_BC).cumsum(1) <= missing_B1))
