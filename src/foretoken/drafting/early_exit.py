"""The target's first layers, run over drafts while they grow: the drafter of self-speculation.

A draft's rows go into the target's own cache after the committed prefix, the root first and then the nodes in order.
Verification goes on from there (``Draft.resume``), so no layer runs twice over a row; a rejected row is
dropped with the rest of the tail.

    target cache, layers < e    prefix | root n0 n1 n2      written here
                  layers >= e   prefix |                    written by verification

Letters: T packed rows, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import ResumePoint
from foretoken.core.errors import UnsupportedArchitecture
from foretoken.core.tree import ROOT
from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.adoption.probe import refusal, same
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output


@dataclass(slots=True)
class EarlyExitBuilder(DraftBuilder):
    """A draft, with the states and taps of the target's first layers.

    Attributes:
        num_read: rows read: 0, or the root and the nodes up to ``num_read - 2``.
        kept: tapped hidden states of each read, depth -> [rows, D].
    """

    num_read: int = 0
    kept: list[dict[int, Tensor]] = field(default_factory=list)

    @property
    def unread(self) -> range:
        """Nodes that were not read yet; the root is -1."""
        return range(self.num_read - 1, len(self.tokens))

    def hidden(self, depth: int) -> Tensor:
        """[rows read, D]: the residual stream at a tapped depth."""
        pieces = [each[depth] for each in self.kept]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def resume_point(self, depth: int) -> ResumePoint:
        """The states from which verification continues."""
        return ResumePoint(depth, self.hidden(depth))


class EarlyExit:
    """The first layers of one target over its engine's cache.

    Args:
        target: checked here.
    Raises:
        UnsupportedArchitecture: the target cannot be run in spans of layers.
    """

    def __init__(self, target: LanguageModel) -> None:
        check_spans(target)
        self.target = target
        self.cache: KVCache | None = None

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target."""
        self.cache = cache

    def read(
        self,
        drafts: Sequence[EarlyExitBuilder],
        depth: int,
        taps: tuple[int, ...],
        *,
        scored: bool,
        head: HeadRows | None = None,
    ) -> Output:
        """Read the unread rows of every draft through layers [0, depth), in one forward; taps are kept in the drafts.

        Args:
            scored: whether the rows also go through the final norm and the head, and are ranked.
            head: score these rows of the head in place of all.
        Returns:
            the forward's output: the drafts' rows one after the other.
        """
        cache = self.cache
        assert cache is not None
        batch = PackedBatch()
        for draft in drafts:
            self._pack(batch, draft, cache, scored)
        span = Span(0, depth, taps=taps)
        output = self.target.forward(batch, DensePlan(cache, batch), top=int(scored), span=span, head=head)
        start = 0
        for draft in drafts:
            rows = slice(start, start + len(draft.unread))
            draft.kept.append({each: values[rows] for each, values in output.hidden.items()})
            start = rows.stop
            draft.num_read = 1 + len(draft.tokens)
        return output

    def _pack(self, batch: PackedBatch, draft: EarlyExitBuilder, cache: KVCache, scored: bool) -> None:
        slot = draft.context.slot
        prefix, read = cache.lengths[slot], draft.num_read
        if not read:
            cache.reserve(slot, 1 + draft.budget.max_nodes)
        fresh = draft.unread
        tokens = [draft.context.tokens[-1] if node == ROOT else draft.tokens[node] for node in fresh]
        if draft.chain:
            wanted = len(tokens) if scored else 0
            batch.add_chunk(slot, prefix, tokens, wanted=wanted, tail=read, verification=True)
            return
        batch.add_level(
            slot,
            prefix,
            tokens,
            depths=[draft.depths[node] for node in fresh],
            tail=read,
            tail_depths=[0, *draft.depths[: read - 1]],
            ancestors=[[0, *(1 + each for each in draft.ancestors(node))] for node in fresh],
        )
        if not scored:
            del batch.wanted[-len(tokens) :]


def check_spans(target: LanguageModel) -> None:
    """Refuse a model with a forward that cannot stop between two layers and continue later.

    Raises:
        UnsupportedArchitecture: a forward in two spans differs from the whole one, or hidden states have no place.
    """
    kind = type(target.model).__name__
    if target.num_layers < 2:
        raise UnsupportedArchitecture(f"model '{target.name}' ({kind}) has one layer: there is none to leave early")

    def check() -> str | None:
        if target.kv_sources:  # the library hands them on within one forward
            return "its layers share keys and values"
        layers = anatomy.find(target.model).layers
        alike = type(layers[0]) is type(layers[-1])
        return _cut_and_compare(target) if alike else "its layers are not all of one kind"

    reason = refusal(target, check, "it cannot be run in spans of layers")
    if reason is not None:
        raise UnsupportedArchitecture(
            f"model '{target.name}' ({kind}) cannot draft for itself: {reason}; use method='draft_model' or 'suffix'"
        )


def _cut_and_compare(target: LanguageModel) -> str | None:
    """Why two halves are not a whole, on five tokens; None if they are."""
    cache, layers = target.new_cache(2), target.num_layers
    rows = range(5)
    slots = cache.acquire(), cache.acquire()
    for slot in slots:
        cache.reserve(slot, len(rows))

    def logits(slot: int, span: Span, wanted: int) -> Output:
        batch = PackedBatch()
        batch.add_chunk(slot, 0, rows, wanted=wanted)
        return target.forward(batch, DensePlan(cache, batch), span=span)

    whole = logits(slots[0], Span(0, layers), len(rows)).logits_MV
    for cut in sorted({1, layers // 2, layers - 1}):
        hidden_TD = logits(slots[1], Span(0, cut, taps=(cut,)), 0).hidden[cut]
        if not same(whole, logits(slots[1], Span(cut, layers, hidden_TD), len(rows)).logits_MV):
            return f"layers 0 to {cut - 1} and then the others give something else than all of them"
    return None
