"""Prefix tree attention: the committed prefix without a mask, the draft under its tree mask, merged by log-sum-exp.

    columns of a row     |      prefix, seen by all rows       | root n0 n1 … |
    dense plan           |            one softmax under one mask              |
    this plan            |  softmax 1, L1 (no mask)            | softmax 2, L2 (tree mask)

    o = w o1 + (1 - w) o2,     w = sigmoid(L1 - L2),     L = log of the sum of a softmax

Paper:   LongSpec's "Hybrid Tree Attention", arXiv:2502.17421, section 3.3; the merge is algebra, no approximation.
Exact:   yes: the dense plan's distribution up to rounding. The native decoder computes both plans with the same
         instructions, because it never masks a prefix and merges its tiles in this way (native/tiles.inc).
Differs: a layer with a sliding window has a third part: the columns of the prefix that only some rows see, masked.
         Soft caps are applied in every part, an attention sink is one more term of the last sum. The dense plan
         computes prompts and single rows, which have nothing to merge.

On a GPU with Triton one kernel computes all of it: that of sparse attention, with every block kept (forward/kernels).

Letters: R rows of a segment, L columns, B of them after the prefix, E before those that all rows see; H query heads, G
key/value heads, n = H / G query heads per group, F = n R folded rows (row f is row f % R of head f // R of its group),
P parts, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.protocols import Scoring
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan, DensePlans
from foretoken.forward.kernels import loading

if TYPE_CHECKING:
    from foretoken.forward.kernels.block_attention import BlockLists

_BLOCK = 64  # columns of the prefix in one block of the kernel


class Part(NamedTuple):
    """Attention over some of the columns.

    Attributes:
        out_GFD: [G, F, Dv]; zero for a row that sees none of them.
        log_sum_GF: float32 [G, F]; -inf for such a row.
    """

    out_GFD: Tensor
    log_sum_GF: Tensor


class PrefixTreePlan(DensePlan):
    """One step's attention.

    Args:
        cache, batch: see :class:`DensePlan`.
    """

    def __init__(self, cache: KVCache, batch: PackedBatch) -> None:
        super().__init__(cache, batch)
        self._seen: dict[int, Tensor] = {}  # by segment, for the kernel: int8 [R, tail + R]
        self._tree_masks: dict[tuple[int, int | None, int, torch.dtype], Tensor] = {}
        self._edges: dict[tuple[int, int, int, int], tuple[int, Tensor | None]] = {}
        self._kernel_lists: dict[tuple[int, int, int], BlockLists] = {}

    def _over(
        self, layer: int, index: int, segment: Segment, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, scoring: Scoring
    ) -> Tensor:
        if not segment.verification or segment.num_rows + segment.tail == 1:
            return super()._over(layer, index, segment, q_HRD, k_GLD, v_GLD, scoring)
        prefix, device = segment.prefix, q_HRD.device
        kernel = loading.kernel(device.type)
        plain = scoring.softcap is None and scoring.sinks_H is None and scoring.window is None
        if kernel is not None and plain and loading.fits(_BLOCK, q_HRD, k_GLD, v_GLD):
            key = (index, prefix, len(k_GLD))
            if key not in self._kernel_lists:
                self._kernel_lists[key] = _every_block(kernel, prefix, len(k_GLD), device)
            if index not in self._seen:
                self._seen[index] = loading.seen(segment, device)
            return kernel.attend(
                q_HRD, k_GLD, v_GLD, self._kernel_lists[key], prefix=prefix, size=_BLOCK,
                seen_RB=self._seen[index], scaling=scoring.scaling,
            )  # fmt: skip

        G = len(k_GLD)
        n = len(q_HRD) // G
        q_GFD = q_HRD.reshape(G, n * segment.num_rows, -1)
        shared, edge_FE = self._edge(index, segment, scoring.window, n, device)
        tree_FB = self._tree_mask(index, segment, scoring.window, n, q_HRD)
        parts = [attention_part(q_GFD, k_GLD[:, prefix:], v_GLD[:, prefix:], tree_FB, scoring)]
        if shared < prefix:
            parts.append(attention_part(q_GFD, k_GLD[:, shared:prefix], v_GLD[:, shared:prefix], None, scoring))
        if edge_FE is not None:
            edge = slice(shared - edge_FE.shape[1], shared)
            parts.append(_written_out(q_GFD, k_GLD[:, edge], v_GLD[:, edge], edge_FE, scoring))
        out_GFD = merge(parts, scoring.sinks_H)
        return out_GFD.view(len(q_HRD), segment.num_rows, -1).transpose(0, 1).to(v_GLD.dtype)

    def _tree_mask(self, index: int, segment: Segment, window: int | None, repeats: int, like: Tensor) -> Tensor:
        """Additive mask [F, tail + R] over the columns after the prefix, in the dtype of ``like``."""
        key = (index, window, repeats, like.dtype)
        if key not in self._tree_masks:
            seen_RB = loading.seen(segment, like.device).bool()
            if window is not None:
                positions_B = _positions(segment, like.device)
                seen_RB = seen_RB & (positions_B[-segment.num_rows :, None] - positions_B[None] < window)
            self._tree_masks[key] = _additive(seen_RB, repeats, like.dtype)
        return self._tree_masks[key]

    def _edge(
        self, index: int, segment: Segment, window: int | None, repeats: int, device: torch.device
    ) -> tuple[int, Tensor | None]:
        """First column of the prefix that every row sees, and a mask of those before it that some rows see."""
        if window is None:
            return 0, None
        key = (index, segment.prefix, window, repeats)
        if key not in self._edges:
            lows_R = (_positions(segment, device)[-segment.num_rows :] - window + 1).clamp(0, segment.prefix)
            least, shared = int(lows_R.min()), int(lows_R.max())
            edge_E = torch.arange(least, shared, device=device)
            mask_FE = _additive(edge_E[None] >= lows_R[:, None], repeats, torch.float32) if shared > least else None
            self._edges[key] = shared, mask_FE
        return self._edges[key]


def attention_part(q_GFD: Tensor, k_GLD: Tensor, v_GLD: Tensor, mask_FL: Tensor | None, scoring: Scoring) -> Part:
    """Compute the attention of all rows over some columns, and the logarithm of its sum.

    Args:
        q_GFD, k_GLD, v_GLD: any strides; at least one column.
        mask_FL: additive, zero or -inf; every row sees at least one column. None: every row sees all.
        scoring: factor and soft cap; the caller applies its window and sinks.
    """
    if scoring.softcap is not None or q_GFD.device.type != "cpu" or q_GFD.shape[-1] != v_GLD.shape[-1]:
        return _written_out(q_GFD, k_GLD, v_GLD, mask_FL, scoring)
    out_1GFD, log_sum_1GF = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_GFD[None], k_GLD[None], v_GLD[None], 0.0, False, attn_mask=mask_FL, scale=scoring.scaling
    )
    return Part(out_1GFD[0], log_sum_1GF[0])


def _written_out(q_GFD: Tensor, k_GLD: Tensor, v_GLD: Tensor, mask_FL: Tensor | None, scoring: Scoring) -> Part:
    """The same for soft caps and masks that the library's kernel lacks; a row may see no column here."""
    scores_GFL = torch.matmul(q_GFD.float(), k_GLD.float().transpose(1, 2)) * scoring.scaling
    if scoring.softcap is not None:
        scores_GFL = torch.tanh(scores_GFL / scoring.softcap) * scoring.softcap
    if mask_FL is not None:
        scores_GFL = scores_GFL + mask_FL
    top_GF1 = scores_GFL.amax(dim=-1, keepdim=True)
    weights_GFL = torch.exp(scores_GFL - top_GF1.masked_fill(top_GF1 == -torch.inf, 0.0))
    sum_GF1 = weights_GFL.sum(dim=-1, keepdim=True)
    out_GFD = torch.matmul(weights_GFL, v_GLD.float()) / sum_GF1.masked_fill(sum_GF1 == 0, 1.0)
    return Part(out_GFD, (top_GF1 + sum_GF1.log())[..., 0])


def merge(parts: Sequence[Part], sinks_H: Tensor | None = None) -> Tensor:
    """Merge parts into one softmax over all their columns, float32 [G, F, Dv].

    Args:
        parts: every row sees a column of the first one.
        sinks_H: one extra logit of each head, which attends to no column.
    """
    (out_GFD, sum_GF), *others = parts
    out_GFD = out_GFD.float()
    for other_GFD, other_GF in others:
        out_GFD = torch.lerp(out_GFD, other_GFD.float(), torch.sigmoid(other_GF - sum_GF)[..., None])
        sum_GF = torch.logaddexp(sum_GF, other_GF)
    if sinks_H is not None:
        G, F = sum_GF.shape
        sinks_GF = sinks_H.float().view(G, -1, 1).expand(-1, -1, F * G // len(sinks_H)).reshape(G, F)
        out_GFD = out_GFD * torch.sigmoid(sum_GF - sinks_GF)[..., None]
    return out_GFD


def _additive(seen_RL: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """A mask for folded rows: zero where a row sees a column, else -inf."""
    mask_RL = torch.zeros(seen_RL.shape, dtype=dtype, device=seen_RL.device).masked_fill_(~seen_RL, -torch.inf)
    return mask_RL.repeat(repeats, 1)


def _positions(segment: Segment, device: torch.device) -> Tensor:
    """Positions of the columns after the prefix, [tail + R]."""
    depths = range(segment.tail + segment.num_rows) if segment.depths is None else segment.depths
    return segment.prefix + torch.tensor(depths, device=device)


def _every_block(kernel: Any, prefix: int, num_groups: int, device: torch.device) -> BlockLists:
    whole = torch.arange(prefix // _BLOCK, device=device)
    return kernel.BlockLists.of([whole] * num_groups)


class PrefixTreePlans(DensePlans):
    """Makes the plan of every step; it is exact, so the verifier's promise holds."""

    name = "prefix_tree"
    attention = PrefixTreePlan

    @classmethod
    def arranged(cls, settings: Mapping[str, Any], target: Any) -> PrefixTreePlans:
        return cls()
