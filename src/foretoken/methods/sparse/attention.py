"""Attention over a few blocks of the prefix, chosen by the root row: for verification steps after a long prefix.

    a dense row      |0000000000000000000000000000000000000000|  root n0 n1 …
    a sparse step    |00|      |00|00|            |00|00|00|00|  root n0 n1 …      the same blocks for all rows

Paper:   sparse verification, arXiv:2512.21911: block-sparse attention, inter-draft-token reuse (only the root row
         retrieves) and inter-layer reuse (only anchor layers retrieve; SA* there).
Exact:   no: a recipe with this plan promises "approximate". Where nothing is left out (short prefixes, a budget of 1)
         it is the dense plan, bit for bit.
Differs: which blocks: see blocks.py. A layer that is no anchor takes the blocks of the nearest anchor
         *before* it, so that a forward stays one pass through the layers; the first layer of a forward that can select
         always does. Layers with a sliding window stay dense: they do not look far back.

Prompts are dense, also in the same packed batch: a segment is sparse if it is a root with its draft, and its prefix is
long enough. The selected blocks and the rows after them form a shorter prefix with dense attention:

    columns of a head   |sink|kept|local|local|rest| root n0 n1 …  ──►  dense attention, prefix = kept + rest

On a GPU with Triton the blocks are read where they lie (forward/kernels); elsewhere, and where a model has soft
caps or attention sinks, they are copied end to end.

Letters: T packed rows, R rows of a segment, L columns, H query heads, G key/value heads, N blocks, K kept blocks,
D key width, Dv value width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.protocols import Scoring
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.kernels import loading
from foretoken.forward.native_plan import Blocks, NativePlan
from foretoken.forward.prefix_tree_attention import PrefixTreePlan
from foretoken.methods.sparse.blocks import BlockRule, BlockSummaries, scores_of_summaries, weights_of_blocks

if TYPE_CHECKING:
    from foretoken.forward.kernels.block_attention import BlockLists


class SparseAttention:
    """Makes each step's plan; stores summaries of its cache's blocks.

    Args:
        rule: how many blocks are kept, and which.
        anchors: layers that select; None: all do.
        base: the plan that attends to the selected blocks: the dense one, or that of prefix tree attention.
    """

    def __init__(
        self, rule: BlockRule, anchors: Sequence[int] | None = None, base: type[DensePlan] = DensePlan
    ) -> None:
        self.rule = rule
        self.base = base
        self.anchors = None if anchors is None else frozenset(anchors)
        self._summaries: tuple[int, BlockSummaries] | None = None  # of the cache with this serial

    def selects(self, layer: int) -> bool:
        """Whether this layer chooses blocks; the first one of a forward does in any case."""
        return self.anchors is None or layer in self.anchors

    def __call__(self, cache: KVCache, batch: PackedBatch) -> DensePlan:
        """The plan of one step; a dense one where no segment is sparse."""
        long = self.rule.dense_below
        if not any(segment.verification and segment.prefix > long for segment in batch.segments):
            return self.base(cache, batch)
        sparse = SparseAttentionPlan if self.base is DensePlan else SparsePrefixTreePlan
        return sparse(cache, batch, self, self.summaries_of(cache))

    def summaries_of(self, cache: KVCache) -> BlockSummaries | None:
        """Return the summaries of a cache's blocks; None if the rule scores exactly."""
        if self.rule.score == "exact":
            return None
        if self._summaries is None or self._summaries[0] != cache.serial:
            self._summaries = (cache.serial, BlockSummaries(cache, self.rule.size, self.rule.score))
        return self._summaries[1]


class SparseAttentionPlan(DensePlan):
    """One step's attention: sparse for long verifications, dense for the other segments.

    Args:
        cache, batch: see :class:`DensePlan`.
        settings: the rule and the anchors.
        summaries: of the cache; None where the rule scores exactly.
    """

    def __init__(
        self, cache: KVCache, batch: PackedBatch, settings: SparseAttention, summaries: BlockSummaries | None
    ) -> None:
        super().__init__(cache, batch)
        self.rule = rule = settings.rule
        self._selects = settings.selects
        self._share = 1.0 if settings.anchors is None else len(settings.anchors) / max(1, cache.num_layers)
        self._summaries = summaries
        self._slots = [segment.slot for segment in batch.segments if segment.verification]
        self.chosen: dict[int, list[Tensor]] = {}  # by segment: the latest anchor's blocks of each head
        self._lists: dict[int, BlockLists] = {}  # the same for the kernel
        self._seen: dict[int, Tensor] = {}  # by segment, for the kernel: int8 [R, tail + R]
        groups = next((keys.shape[1] for keys in cache.keys if keys is not None), 1)
        keep = [self._keep(segment, groups) for segment in batch.segments]
        if any(keep):
            self.prefix_read = [
                rule.read(segment.prefix, count, groups) for segment, count in zip(batch.segments, keep, strict=True)
            ]
            blocks = Blocks(
                size=rule.size,
                sinks=rule.sinks,
                locals=rule.locals,
                sets=rule.sets,
                keep=keep,
                score=rule.score,
                voters=rule.voters,
                selects=self._selects,
                summaries=None if summaries is None else self._summaries_of,
            )
            self.native = NativePlan(cache, blocks)

    def _keep(self, segment: Segment, num_groups: int) -> int:
        keep = self.rule.keep(segment.prefix, num_groups) if segment.verification else 0
        return keep if keep and self.rule.pays(segment.prefix, keep, num_groups, segment.num_rows, self._share) else 0

    def _summaries_of(self, layer: int) -> Tensor:
        assert self._summaries is not None, "only scores by summaries use them"
        return self._summaries.of(layer, self._slots)

    def _scores(self, layer: int, segment: Segment, q_HRD: Tensor, k_GLD: Tensor, scoring: Scoring) -> Tensor:
        """Return the scores of the blocks, of the rows that vote, float32 [G, N]."""
        num_blocks = self.rule.num_blocks(segment.prefix)
        voters = range(self.rule.num_voters(segment.num_rows))
        if self._summaries is not None:
            q_HD = q_HRD[:, : len(voters)].sum(dim=1)
            return scores_of_summaries(q_HD, self._summaries_of(layer)[segment.slot, :, :num_blocks])
        own: dict[str, Any] = {"scaling": scoring.scaling, "softcap": scoring.softcap, "sinks_H": scoring.sinks_H}
        first, scores = segment.prefix + segment.tail, []
        for row in voters:
            k_GCD = k_GLD[:, : first + row + 1]
            if segment.seen is not None:  # of a tree a row sees its own path
                path = segment.prefix + segment.seen[row].nonzero()[:, 0].to(k_GLD.device)
                k_GCD = torch.cat([k_GLD[:, : segment.prefix], k_GLD[:, path]], dim=1)
            scores.append(weights_of_blocks(q_HRD[:, row], k_GCD, self.rule.size, num_blocks, **own))
        return torch.stack(scores).sum(dim=0)

    def _over(
        self, layer: int, index: int, segment: Segment, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, scoring: Scoring
    ) -> Tensor:
        keep = self._keep(segment, k_GLD.shape[0])
        if not keep or scoring.window is not None:
            return super()._over(layer, index, segment, q_HRD, k_GLD, v_GLD, scoring)
        chosen = self.chosen.get(index)
        if chosen is None or len(chosen) != k_GLD.shape[0] or self._selects(layer):
            scores_GN = self._scores(layer, segment, q_HRD, k_GLD, scoring)
            chosen = self.chosen[index] = self.rule.select(scores_GN, keep)
            self._lists.pop(index, None)
        kernel = loading.kernel(q_HRD.device.type)
        plain = scoring.softcap is None and scoring.sinks_H is None
        if kernel is not None and plain and loading.fits(self.rule.size, q_HRD, k_GLD, v_GLD):
            if index not in self._lists:
                self._lists[index] = kernel.BlockLists.of(chosen)
            if index not in self._seen:
                self._seen[index] = loading.seen(segment, q_HRD.device)
            of_segment = {"prefix": segment.prefix, "size": self.rule.size, "seen_RB": self._seen[index]}
            return kernel.attend(q_HRD, k_GLD, v_GLD, self._lists[index], scaling=scoring.scaling, **of_segment)
        if self.rule.sets != "global":  # as many for each head: all heads in one piece
            groups = [(slice(None), torch.stack(chosen))]
        else:
            groups = [(slice(head, head + 1), blocks[None]) for head, blocks in enumerate(chosen)]
        n = q_HRD.shape[0] // k_GLD.shape[0]
        outputs = []
        for heads, blocks_GK in groups:
            k_GKD, v_GKD = (_kept(each[heads], blocks_GK, self.rule.size, segment.prefix) for each in (k_GLD, v_GLD))
            shorter = replace(segment, prefix=segment.prefix - k_GLD.shape[1] + k_GKD.shape[1])
            some = slice(None) if heads == slice(None) else slice(heads.start * n, heads.stop * n)
            own = scoring if scoring.sinks_H is None else scoring._replace(sinks_H=scoring.sinks_H[some])
            outputs.append(super()._over(layer, index, shorter, q_HRD[some], k_GKD, v_GKD, own))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class SparsePrefixTreePlan(SparseAttentionPlan, PrefixTreePlan):
    """The same with prefix tree attention over the selected blocks: no mask over the kept ones."""


def _kept(x_GLD: Tensor, blocks_GK: Tensor, size: int, prefix: int) -> Tensor:
    """The columns of these blocks, and those after the last whole block."""
    whole = prefix // size * size
    blocks_GNBD = x_GLD[:, :whole].reshape(len(x_GLD), whole // size, size, -1)
    heads_G1 = torch.arange(len(x_GLD), device=x_GLD.device)[:, None]
    return torch.cat([blocks_GNBD[heads_G1, blocks_GK].flatten(1, 2), x_GLD[:, whole:]], dim=1)
