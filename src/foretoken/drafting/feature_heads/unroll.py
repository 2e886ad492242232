"""The computation of drafting, for many pairs at once: EAGLE-3's training-time test, for any described network.

    column i of step s     reads the feature recycled from its own output of step s - 1, and x_{i+1+s}, at position
                           i + s; in every layer it attends to the pairs <= i of step 0, and to itself at steps 1..s

Only wanted columns are computed after step 0; the others are keys and values of step 0. The rows of all sequences are
concatenated, because the number of wanted columns differs between sequences.

Paper: EAGLE-3, arXiv:2503.01840, section 3.2 and figure 6.

Letters: B sequences, T positions, C = T - 1 columns, N wanted columns, R rows of a step, F width of the target's
states, W width, V vocabulary, H query heads, G key/value heads, d head width.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.core.protocols import Plan, Scoring
from foretoken.drafting.feature_heads.column_attention import columns_attend
from foretoken.drafting.feature_heads.pair_network import PairNetwork

Unroll = Callable[..., Iterator[Tensor]]  # as :func:`unrolled`, of any network


def every_column(tokens_BT: Tensor) -> Tensor:
    """All columns are wanted: bool [B, C]."""
    return torch.ones(len(tokens_BT), tokens_BT.shape[1] - 1, dtype=torch.bool, device=tokens_BT.device)


def unrolled(
    network: PairNetwork,
    states_BTF: Tensor,
    tokens_BT: Tensor,
    embedding_VW: Tensor,
    steps: int,
    wanted_BC: Tensor,
    later_BC: Tensor | None = None,
) -> Iterator[Tensor]:
    """Draft ``steps`` tokens from every wanted pair.

    Args:
        states_BTF: the target's states of rows 0..T-1, the taps side by side.
        tokens_BT: x_0..x_{T-1}.
        embedding_VW: see :meth:`PairNetwork.embedding_of`.
        steps: S.
        wanted_BC: bool.
        later_BC: bool, those of the wanted columns that go on after step 0; None: all.
    Returns:
        for s = 0, 1, ..: the input of the LM head for the wanted columns, [N, W], sequence by sequence; it predicts
        x_{i+2+s}. Where x_{i+1+s} is beyond the text, the row means nothing.
    """
    length = tokens_BT.shape[1] - 1
    layers = network.description.layers
    plan = ColumnPlan(wanted_BC, layers.count, narrow=layers.library is None)
    every_BC = every_column(tokens_BT)
    g_RW, (sequence_R, column_R) = network.fuse(states_BTF[:, :length].flatten(0, 1)), every_BC.nonzero(as_tuple=True)
    for step in range(min(steps, length)):
        token_R = tokens_BT[sequence_R, (column_R + step + 1).clamp_max(length)]
        rows_R = None if step else wanted_BC.flatten()
        h_NW = network.decode(g_RW, F.embedding(token_R, embedding_VW), column_R + step, plan, rows_R)
        scored_NW = network.read_out(h_NW)
        g_RW = scored_NW if network.description.recycle.normed else h_NW
        yield scored_NW
        plan.step = step + 1
        if later_BC is not None:
            if not step:
                g_RW = g_RW[later_BC[wanted_BC]]
                plan.only(later_BC)
            wanted_BC = later_BC
        sequence_R, column_R = wanted_BC.nonzero(as_tuple=True)


class ColumnPlan(Plan):
    """Attention of unrolled columns: each layer keeps the pairs of step 0, and each wanted column's later steps.

    Args:
        wanted_BC: bool.
        num_layers: of the network.
        narrow: in step 0 the last layer has queries of wanted columns only; else of all.

    Attributes:
        step: of the next calls.
    """

    def __init__(self, wanted_BC: Tensor, num_layers: int, *, narrow: bool) -> None:
        self._wanted_BC, self._last, self.step = wanted_BC, num_layers - 1 if narrow else num_layers, 0
        self._wanted = [each.nonzero()[:, 0] for each in wanted_BC]
        self._first: list[tuple[Tensor, Tensor]] = []  # of each layer: keys and values, [B, G, C, d]
        self._own = list[list[tuple[Tensor, Tensor]]]()  # of each layer and later step: [G, N, d]

    def only(self, wanted_BC: Tensor) -> None:
        """Other wanted columns from now on, after step 0."""
        self._wanted = [each.nonzero()[:, 0] for each in wanted_BC]

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        """[R, H, Dv]."""
        columns, seen = self._wanted, scoring.window or self._wanted_BC.shape[1]
        if seen < self._wanted_BC.shape[1] or scoring.softcap is not None or scoring.sinks_H is not None:
            raise UnsupportedArchitecture(
                "draft networks with capped scores, sinks or a window below the length of a text cannot be trained"
            )
        if self.step:
            self._own[layer].append((k_GTD, v_GTD))
        else:
            pairs_BC = self._wanted_BC.shape
            k, v = (each.unflatten(1, pairs_BC).transpose(0, 1) for each in (k_GTD, v_GTD))
            self._first.append((k, v))
            self._own.append([])
            if layer != self._last:
                columns = [torch.arange(pairs_BC[1], device=q_HTD.device)] * pairs_BC[0]
        own, found, begin = self._own[layer], [], 0
        for k_GCd, v_GCd, column_n in zip(*self._first[layer], columns, strict=True):
            if not len(column_n):
                continue
            rows = slice(begin, begin + len(column_n))
            begin += len(column_n)
            later = [torch.stack([step[side][:, rows] for step in own], 2) for side in (0, 1)] if own else []
            found.append(columns_attend(q_HTD[:, rows], k_GCd, v_GCd, column_n, scoring.scaling, *later))
        none = q_HTD.new_zeros(len(q_HTD), 0, v_GTD.shape[-1])
        return (torch.cat(found, dim=1) if found else none).transpose(0, 1)
