"""Trial forwards of a few rows at positions far apart: they show the results for long contexts at load time.

A few rows at the beginning of the context, others around position 2^13 or at its end, without a prefix: no long prompt
has to be read. Attention is written out plainly here, so that a packed layout of the weights has something to be
compared with.

Letters: T packed rows, R rows of a segment, L columns that they may see, H query heads, G key/value heads, D key width,
M wanted rows, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.core.protocols import Plan, Scoring
from foretoken.forward import anatomy, attention
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.ssm.layout import Mixer, Projected, alone
from foretoken.models.adoption.probe import same

_ROWS = 4
_FAR = 2**13  # temperatures and rotary frequencies that depend on the position commonly begin to change here

# Standard deviation of the difference that two layouts of the same weights may have, in units of the logits' spread.
# The float32 layouts of the tested families differ by less than 1e-5; of the bfloat16 ones by less than 0.1.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3}


class TrialPlan(Plan):
    """Rows attend to the rows of their own segment, up to themselves.

    Args:
        batch: the rows, without prefixes and trees.
        cache: lets a native decoder compute the same; None: layer by layer.
    """

    def __init__(self, batch: PackedBatch, cache: KVCache | None = None) -> None:
        self.segments = batch.segments
        self.native = None if cache is None else NativePlan(cache)

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        outputs = []
        for segment in self.segments:
            rows = slice(segment.start, segment.start + segment.num_rows)
            outputs.append(attended(segment, q_HTD[:, rows], k_GTD[:, rows], v_GTD[:, rows], scoring))
        return torch.cat(outputs)

    def mix(self, mixer: Mixer, projected: Projected) -> Tensor:
        """Each segment as a text of its own, read from its start."""
        gates_T2H = mixer.gates(projected.steps_TH, ["prompt"] * len(projected.raw_TC))
        spans = [slice(each.start, each.start + each.num_rows) for each in self.segments]
        return torch.cat([alone(mixer, projected.raw_TC[rows], gates_T2H[rows]) for rows in spans])


def attended(
    segment: Segment, q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, scoring: Scoring, *, rounded: bool = False
) -> Tensor:
    """Attention of a segment's rows written out, [R, H, D].

    Args:
        k_GLD, v_GLD: of its prefix, its tail and its rows.
        rounded: round attention weights to the values' dtype.
    """
    scaling, window, softcap, sinks_H = scoring
    repeats = q_HRD.shape[0] // k_GLD.shape[0]
    k_HLD, v_HLD = (each.float().repeat_interleave(repeats, dim=0) for each in (k_GLD, v_GLD))
    scores_HRL = q_HRD.float() @ k_HLD.transpose(1, 2) * scaling
    if softcap is not None:
        scores_HRL = softcap * torch.tanh(scores_HRL / softcap)
    scores_HRL = scores_HRL.masked_fill(~visible(segment, window).to(scores_HRL.device), -torch.inf)
    if sinks_H is not None:
        sinks_HR1 = sinks_H.float().view(-1, 1, 1).expand(-1, segment.num_rows, 1)
        scores_HRL = torch.cat([scores_HRL, sinks_HR1], dim=-1)
    weights_HRL = scores_HRL.softmax(dim=-1)[..., : k_HLD.shape[1]]
    if rounded:
        weights_HRL = weights_HRL.to(v_GLD.dtype).float()
    return (weights_HRL @ v_HLD).to(v_GLD.dtype).transpose(0, 1)


def visible(segment: Segment, window: int | None) -> Tensor:
    """bool [R, L]: the columns that each row of a segment sees: its path, and of that the last ``window``."""
    behind = segment.tail + segment.num_rows
    seen = torch.ones(segment.num_rows, behind, dtype=torch.bool).tril(segment.tail)
    if segment.seen is not None:
        seen = segment.seen
    seen = torch.cat([torch.ones(segment.num_rows, segment.prefix, dtype=torch.bool), seen], dim=1)
    if window is None:
        return seen
    places = seen.cumsum(dim=1)  # of a column on the row's path, counted from 1
    return seen & (places > places[:, -1:] - window)


def trial_batch(reach: int) -> PackedBatch:
    """One segment: the first rows are at the beginning, the last at position 2^13 or at the model's limit.

    They are one segment because rotary embeddings only show between rows: rows that are all moved look the same.
    """
    half = min(_ROWS, reach // 2)
    far = min(_FAR, reach) - half
    positions = [*range(half), *range(far, far + half)] or [0]
    batch = PackedBatch.of_text(_tokens(len(positions)))
    batch.positions = positions
    return batch


def _tokens(count: int) -> list[int]:
    return [number % 2 for number in range(count)]


def check_positions(model: Any, max_length: int, device: torch.device) -> None:
    """Refuse a model that counts rows or cache entries instead of reading the given positions.

    The same rows are computed twice by the library's own forward, with the same position ids: without a cache, as a
    packed batch is, and after a cache that claims to hold everything before them, as the library generates.

    Raises:
        UnsupportedArchitecture: the two differ.
    """
    rows = min(_ROWS, max_length)
    batch = PackedBatch.of_text(_tokens(rows))
    for start in sorted({min(_FAR - rows // 2, max_length - rows), max_length - rows}):
        inputs = {
            "input_ids": batch.ids_1T(device),
            "position_ids": batch.positions_1T(device) + start,
            "use_cache": False,
        }
        with torch.inference_mode(), attention.following(TrialPlan(batch)):
            given_TV = model(**inputs).logits[0]
            counted_TV = model(**inputs, **{anatomy.cache_argument(model): _Claimed(start)}).logits[0]
        if not same(given_TV, counted_TV):
            raise UnsupportedArchitecture(
                f"around position {start} it counts the rows of the batch instead of reading the positions given: "
                f"serve no more, with max_model_len={start}"
            )


class _Claimed(DynamicCache):
    """A cache that says it holds so many tokens, and keeps nothing."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


Forward = Callable[[PackedBatch, TrialPlan], Tensor]


def read(forward: Forward, reach: int, cache: KVCache | None = None) -> Tensor:
    """Logits of the trial batch, [M, V] float32.

    Args:
        forward: computes the wanted rows' logits of a batch.
        reach: positions to go up to. A native decoder looks back from the position, so a window must not begin after
            the first position: there it has nothing to see.
        cache: lets a native decoder compute it, in that cache's slots.
    """
    batch = trial_batch(reach)
    if cache is not None:
        cache.reserve(cache.acquire(), len(batch))
    return forward(batch, TrialPlan(batch, cache)).float()


def difference(found_MV: Tensor, expected_MV: Tensor, dtype: torch.dtype) -> str | None:
    """How the distributions of logits differ beyond rounding, in words; None if they do not.

    A common shift of all logits of a row is no difference; NaN equals NaN.
    """
    both = ~(found_MV.isnan() & expected_MV.isnan())
    apart_M = torch.where(both, found_MV - expected_MV, 0).std(-1, correction=0)
    spread_M = expected_MV.nan_to_num().std(-1)
    ratio = float((apart_M / spread_M.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(torch.inf).max())
    if ratio <= _ROUNDING[dtype]:
        return None
    return f"logits differ by {ratio:.2g} of their spread"
