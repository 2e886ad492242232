"""Dense attention over the committed prefix and the tree after it: the exact plan.

Each segment of a packed batch attends to its own slot. The columns visible to each row, for a prefix of 4 and the draft
root -> (a -> c, b):

              prefix      root a b c
        root  1 1 1 1      1   . . .
        a     1 1 1 1      1   1 . .
        b     1 1 1 1      1   . 1 .
        c     1 1 1 1      1   1 . 1

With a sliding window of w a row sees the last w positions, itself included; a tree node's position is prefix + depth.

Letters: T packed rows, R rows of a segment, L = prefix + tail + R visible columns, H query heads, G key/value heads,
n = H / G query heads per group, D key width, Dv value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.protocols import Plan, PlanMaker, Scoring
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.ssm.layout import Mixer, Projected
from foretoken.forward.ssm.state import Mixing

_FOLD_ROWS = 64  # up to so many rows, the query heads of a group are folded into rows: keys are read once per group


class DensePlan(Plan):
    """One step's attention. Masks are built once per step and window, and shared by all layers.

    Args:
        cache: where keys and values are written and read, and the states of layers that have mixers.
        batch: the rows; every segment must have been reserved.
    """

    scanned = False  # how recurrences are computed: row by row

    def __init__(self, cache: KVCache, batch: PackedBatch) -> None:
        self.cache = cache
        self.native: NativePlan | None = NativePlan(cache)
        self.segments = batch.segments
        self._masks: dict[tuple[int, int, int | None, int, torch.dtype], Tensor | None] = {}
        self._batch = batch
        self._mixing: Mixing | None = None

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        """Write the rows' keys and values into the cache, attend, and return [T, H, Dv]."""
        keys_SGCD, values_SGCD = self.cache.buffers(layer, k_GTD, v_GTD)
        outputs = []
        for index, segment in enumerate(self.segments):
            rows = slice(segment.start, segment.start + segment.num_rows)
            first = segment.prefix + segment.tail
            visible = first + segment.num_rows
            k_GLD = keys_SGCD[segment.slot, :, :visible]
            v_GLD = values_SGCD[segment.slot, :, :visible]
            k_GLD[:, first:] = k_GTD[:, rows]
            v_GLD[:, first:] = v_GTD[:, rows]
            q_HRD = q_HTD[:, rows]
            read = k_GLD.to(q_HRD.dtype), v_GLD.to(q_HRD.dtype)
            outputs.append(self._over(layer, index, segment, q_HRD, *read, scoring))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def mix(self, mixer: Mixer, projected: Projected) -> Tensor:
        """Run the recurrence of each segment after its slot's state; see forward/ssm/state.py."""
        if self._mixing is None:
            self._mixing = Mixing(self.cache, self._batch, scanned=self.scanned)
        return self._mixing(mixer, projected)

    def _over(
        self, layer: int, index: int, segment: Segment, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, scoring: Scoring
    ) -> Tensor:
        """One segment over its visible columns: [R, H, Dv]."""
        if scoring.softcap is None and scoring.sinks_H is None:
            return self._fused(index, segment, q_HRD, k_GLD, v_GLD, scoring)
        return self._plain(index, segment, q_HRD, k_GLD, v_GLD, scoring)

    def _fused(
        self, index: int, segment: Segment, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention through the library kernel: [R, H, Dv]."""
        scaling, window = scoring.scaling, scoring.window
        H, R, D = q_HRD.shape
        G = k_GLD.shape[0]
        n = H // G
        if R <= _FOLD_ROWS:
            mask = self._mask(index, segment, window, n, q_HRD)
            q_1GFD = q_HRD.reshape(1, G, n * R, D)
            o_1GFD = F.scaled_dot_product_attention(q_1GFD, k_GLD[None], v_GLD[None], attn_mask=mask, scale=scaling)
            if R == 1:
                return o_1GFD.view(1, H, -1)
            return o_1GFD.view(H, R, -1).transpose(0, 1)
        mask = self._mask(index, segment, window, 1, q_HRD)
        o_1HRD = F.scaled_dot_product_attention(
            q_HRD[None], k_GLD[None], v_GLD[None], attn_mask=mask, scale=scaling, enable_gqa=n > 1
        )
        return o_1HRD[0].transpose(0, 1)

    def _plain(
        self, index: int, segment: Segment, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention written out, for options that the library kernel lacks: [R, H, Dv]."""
        scaling, window, softcap, sinks_H = scoring
        H, R, D = q_HRD.shape
        G, L, _ = k_GLD.shape
        n = H // G
        scores = torch.matmul(q_HRD.reshape(G, n * R, D), k_GLD.transpose(1, 2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask = self._mask(index, segment, window, n, q_HRD)
        if mask is not None:
            scores = scores + mask
        scores = scores.float()
        if sinks_H is not None:
            sink = sinks_H.float().view(G, n, 1, 1).expand(G, n, R, 1).reshape(G, n * R, 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :L]
        else:
            weights = torch.softmax(scores, dim=-1)
        o_GFD = torch.matmul(weights.to(v_GLD.dtype), v_GLD)
        return o_GFD.view(H, R, -1).transpose(0, 1)

    def _mask(self, index: int, segment: Segment, window: int | None, repeats: int, like: Tensor) -> Tensor | None:
        """Additive mask [repeats * R, L] in the dtype of ``like``; None where every row sees every column."""
        key = (index, segment.prefix, window, repeats, like.dtype)
        if key not in self._masks:
            allowed = _allowed(segment, window, like.device)
            if allowed is None:
                self._masks[key] = None
            else:
                mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
                mask.masked_fill_(~allowed, torch.finfo(like.dtype).min)
                self._masks[key] = mask.repeat(repeats, 1)
        return self._masks[key]


def _allowed(segment: Segment, window: int | None, device: torch.device) -> Tensor | None:
    """bool [R, L]: the columns visible to each row; None if all are."""
    prefix, num_rows = segment.prefix, segment.num_rows
    length = prefix + segment.tail + num_rows
    if num_rows == 1 and segment.seen is None and (window is None or length <= window):
        return None
    allowed = torch.ones(num_rows, length, dtype=torch.bool, device=device)
    positions = torch.arange(length, device=device)
    if segment.seen is None:
        allowed.tril_(length - num_rows)
    else:
        allowed[:, prefix:] = segment.seen.to(device)
        positions[prefix:] = prefix + torch.tensor(segment.depths, device=device)
    if window is not None and length > window:
        allowed &= positions[-num_rows:, None] - positions[None, :] < window
    return allowed


class DensePlans(PlanMaker):
    """Makes the dense plan of every step: nothing is left out, and the verifier's promise stands.

    Attributes:
        attention: the plan of one step.
    """

    attention: type[DensePlan] = DensePlan

    def __call__(self, cache: KVCache, batch: PackedBatch) -> DensePlan:
        return self.attention(cache, batch)
