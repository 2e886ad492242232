"""One forward of the target: it goes on from drafts' resume points, and keeps the hidden states a drafter asks for.

    rows of a prompt, plain roots     layers [0, e) ──┐
    rows that resume at depth e       (already run) ──┴── layers [e, L) ── final norm ── head
                                                                        └ kept for a verifier, of the wanted rows

Without resume points this is the ordinary forward, with taps. A forward taps the same rows at every depth: where a
drafter and a verifier want different ones, all of them are kept, and each gets its own.

Letters: M wanted rows, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.needs import HiddenLayers
from foretoken.core.protocols import Plan
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel, Output


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one segment that the drafter sees.

    Attributes:
        begin: position of the first row shown.
        hidden: depth -> [rows, D].
        best: the most probable token after each of these rows; empty where not all of them were scored.
    """

    begin: int
    hidden: dict[int, Tensor]
    best: Sequence[int]


def resumed_forward(
    target: LanguageModel,
    cache: KVCache,
    batch: PackedBatch,
    drafts: Sequence[Draft],
    plan: Plan,
    needed: HiddenLayers,
    *,
    last: bool = False,
) -> tuple[Output, list[Piece]]:
    """Compute the wanted rows, each layer once for every row, and the hidden states that the drafter needs.

    Args:
        cache: the target's.
        batch: one segment per draft.
        drafts: one for each segment; those with a resume point have it at the same depth.
        plan: of the batch; rows that catch up do so under dense attention.
        needed: the depths to show.
        last: also keep the last layer's output for the wanted rows, [M, D], as the output's ``hidden[L]``.
    Raises:
        ValueError: drafts resume at different depths.
    """
    segments = batch.segments
    depths = {draft.resume.depth for draft in drafts if draft.resume is not None}
    if len(depths) > 1:
        raise ValueError(f"drafts of one step resume at different depths: {sorted(depths)}")
    depth = depths.pop() if depths else 0
    late = [s for s, draft in zip(segments, drafts, strict=True) if draft.resume is None] if depth else []
    below = _catch_up(target, cache, batch.of_segments(late), depth, needed) if late else {}

    entering_TD = None
    if depth:
        pieces, start = [], 0
        for segment, draft in zip(segments, drafts, strict=True):
            if draft.resume is not None:
                pieces.append(draft.resume.hidden_TD)
            else:
                pieces.append(below[depth][start : start + segment.num_rows])
                start += segment.num_rows
        entering_TD = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    shown = [_shown(segment, draft, needed) for segment, draft in zip(segments, drafts, strict=True)]
    taps = tuple(each for each in needed.depths if each > depth)
    rows = [row for each in shown for row in each] if taps else []
    if not last:
        output = target.forward(batch, plan, span=Span(depth, target.num_layers, entering_TD, taps, rows))
        return output, _pieces(batch, drafts, shown, output, output.hidden, below, needed)
    end = target.num_layers
    kept = sorted({*rows, *batch.wanted})
    span = Span(depth, end, entering_TD, tuple(sorted({*taps, end})), kept)
    output = target.forward(batch, plan, span=span)
    place = {row: index for index, row in enumerate(kept)}
    ours, theirs = ([place[row] for row in each] for each in (batch.wanted, rows))
    seen = {each: output.hidden[each][theirs] for each in taps}
    output = replace(output, hidden={end: output.hidden[end][ours]})
    return output, _pieces(batch, drafts, shown, output, seen, below, needed)


def _catch_up(
    target: LanguageModel, cache: KVCache, late: PackedBatch, depth: int, needed: HiddenLayers
) -> dict[int, Tensor]:
    """Bring rows without a resume point to the depth of the others: depth -> [rows, D], all rows."""
    taps = tuple(sorted({depth, *(each for each in needed.depths if each < depth)}))
    return dict(target.forward(late, DensePlan(cache, late), span=Span(0, depth, taps=taps)).hidden)


def _shown(segment: Segment, draft: Draft, needed: HiddenLayers) -> range:
    """Packed rows that are shown: of a prompt perhaps only the last ones, of a draft not the probes after it."""
    start, end = segment.start, segment.start + segment.num_rows
    if len(draft):
        return range(start, start + 1 + len(draft))
    return range(start if needed.last is None else max(start, end - needed.last), end)


def _pieces(
    batch: PackedBatch,
    drafts: Sequence[Draft],
    shown: Sequence[range],
    output: Output,
    seen: Mapping[int, Tensor],
    below: dict[int, Tensor],
    needed: HiddenLayers,
) -> list[Piece]:
    """Split the hidden states by request; ``seen`` has the shown rows one after the other."""
    scored = {row: index for index, row in enumerate(batch.wanted)}
    found = []
    above = caught_up = 0
    for segment, draft, rows in zip(batch.segments, drafts, shown, strict=True):
        hidden = {d: values[above : above + len(rows)] for d, values in seen.items()}
        above += len(rows)
        first = rows.start - segment.start
        if below and draft.resume is None:
            for d in needed.depths:
                if d in below:
                    hidden[d] = below[d][caught_up + first : caught_up + first + len(rows)]
            caught_up += segment.num_rows
        best = [output.best[scored[row]] for row in rows] if all(row in scored for row in rows) else []
        found.append(Piece(batch.positions[segment.start] + first, hidden, best))
    return found
