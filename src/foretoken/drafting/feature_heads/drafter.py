"""What drafters over a target's hidden states share: pairs read as they come, drafts grown from the head's own outputs.

    rows known    0 .. n-1           the target's, with their states; token n is the root
    pairs read    0 .. n-1           pair i = (feature of row i, token i + 1); the last one gives the first law
    drafting      pair n-1+t         (own output of the row before, drafted token): never kept
    next step     root and accepted rows come with the target's states, and are read again from these

So the cache always holds what reading the target's states from the beginning would have made of it.

Letters: T rows, M wanted rows, F width of the fused depths, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError, RequestError, nearest
from foretoken.core.needs import HiddenLayers, Needs, Offers
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.core.tree import ROOT
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.ahead import ReadAhead, foreseen
from foretoken.drafting.draft_builder import no_numbers
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.feature_heads.native.chains import Ahead
from foretoken.drafting.feature_heads.native.pairs import Extent, GrownTree
from foretoken.drafting.feature_heads.unread import Unread, UnreadStates
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.quantised.rounding import SCHEMES

_SLOTS = 1024  # requests at once, at most; buffers grow with use
_UNREAD_ROWS = 512  # states of a prompt that wait for the head, at most


@dataclass(slots=True)
class _Builder(RerankedBuilder):
    """A draft while it grows.

    Attributes:
        rows: tail row of each node that was read.
        following_MW: features behind the rows of the last forward that were this draft's.
    """

    state: Unread = field(kw_only=True)
    rows: dict[int, int] = field(default_factory=dict)
    following_MW: Tensor | None = None

    def features(self) -> Tensor:
        """[frontier, W]: what the frontier's nodes are paired with, their parents' own outputs."""
        assert self.following_MW is not None
        if len(self.expanded) == len(self.frontier) == 1:
            return self.following_MW
        place = {node: row for row, node in enumerate(self.expanded)}
        return self.following_MW[[place[self.parents[node]] for node in self.frontier]]


class HeadPass(NamedTuple):
    """One pass of a head.

    Attributes:
        output: of its wanted rows.
        following_MW: the features that follow these rows.
        drafts, tokens: see :class:`foretoken.drafting.ahead.ReadPass`.
    """

    output: Output
    following_MW: Tensor
    drafts: Sequence[int] = ()
    tokens: Sequence[int] = ()


class AheadRunner(Protocol):
    """Makes several passes of a chain, or all levels of a tree, in one call."""

    def passes(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        *,
        top: int,
        rows: HeadRows | None = None,
        ahead: Sequence[Ahead],
    ) -> list[HeadPass]:
        """As :meth:`HeadRunner.forward`, and of each draft as many further passes as are foreseen.

        Args:
            ahead: for each segment, whose last row is the only one that is wanted; see native/pairs.py.
        """
        ...

    def trees(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        *,
        extents: Sequence[Extent],
        width: int,
        top: int,
        rows: HeadRows | None = None,
    ) -> list[GrownTree]:
        """As :meth:`HeadRunner.forward`, and behind it all levels of the trees that grow there.

        Args:
            extents: for each segment, whose last row is the only one that is wanted; see native/pairs.py.
            width: nodes of a level that are expanded.
            top: children that a node gets.
        """
        ...


class HeadRunner(Protocol):
    """Runs a head over packed rows; runner.py has one.

    Attributes:
        num_layers: of its cache.
        scored: tokens that it scores.
        odd_rows: what scores them, if that is not the target's whole head, as in "it has ..."; None: it is.
        ahead: who makes several passes in one call; None: nobody.
    """

    @property
    def ahead(self) -> AheadRunner | None: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def scored(self) -> int: ...

    @property
    def odd_rows(self) -> str | None: ...

    def features(self, states_TF: Tensor) -> Tensor:
        """[T, W] of the target's states, the depths side by side; a row's bits depend on that row only."""
        ...

    def forward(
        self, batch: PackedBatch, cache: KVCache, g_TW: Tensor, *, top: int, rows: HeadRows | None = None
    ) -> tuple[Output, Tensor]:
        """Run pairs; keys and values go into the cache.

        Args:
            batch: a row for each pair, with its token.
            g_TW: their features.
            top: how many tokens of each wanted row to rank.
            rows: of the target's head, scored in place of all; only without ``odd_rows``.
        Returns:
            logits of the wanted rows over the target's vocabulary, or over the columns of ``rows``, with the ranked
            tokens, and the features that follow these rows, [M, W].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GrowthOptions:
    """Options of every such drafter.

    Attributes:
        tree: propose a tree of the most probable continuations instead of a chain.
        max_depth: longest path of a draft.
        width: of a tree: continuations recorded at a node, and nodes expanded at a level.
        draft_vocab: a folder of `foretoken calibrate vocabulary`: only its tokens are scored and drafted
            (docs/methods/vocabtrim.md); None: all that the head scores.
    """

    tree: bool = False
    max_depth: int = 6
    width: int = 8
    draft_vocab: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tree, bool):
            raise ConfigError(f"tree={self.tree!r} must be true or false")
        for name in ("max_depth", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
                raise ConfigError(f"{name}={value!r} must be an integer between 1 and 64")
        draft_vocabulary.check_option(self.draft_vocab)


@dataclass(frozen=True, kw_only=True)
class HeadOptions(GrowthOptions):
    """Options of a drafter whose head lies in a folder.

    Attributes:
        head: the folder; None: one beside the target's weights.
        dtype: int8 or int4 rounds the layers and rows of the head's own, for the native decoder; None: the target's.
    """

    head: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.head is not None and not isinstance(self.head, str | Path):
            raise ConfigError(f"head={self.head!r} must be a folder")
        if self.dtype is not None and self.dtype not in SCHEMES:
            raise ConfigError(f"dtype={self.dtype!r}: {nearest(str(self.dtype), SCHEMES)}")
        super().__post_init__()


class FeatureDrafter(Drafter):
    """Drafts with a head over the target's hidden states; a subclass finds the head.

    Exact: chains carry the q they were drawn from (a point mass at temperature 0), trees are point masses; a token that
    the head or a draft vocabulary does not score has q = 0. Lossless under any lossless verifier that knows the kind.

    Args:
        options: of the drafts.
        target: whose states are read.
        runner: of the head.
        depths: of the target's residual stream, in the order in which the head reads them.
        final: whether it reads the deepest one behind the target's final norm.
    Raises:
        ConfigError: a draft vocabulary is asked for, and something else than the target's whole head scores.
        ModelError, MismatchError: there is none in its folder, or it is damaged, or another tokenizer's.
        UnsupportedArchitecture: the target does more to hidden states than a linear head.
    """

    laws: tuple[type[Law], ...] = (Sampled,)
    offers = Offers(evidence=(GreedyLaws,))

    def __init__(
        self, options: GrowthOptions, target: LanguageModel, runner: HeadRunner, depths: Sequence[int], *, final: bool
    ) -> None:
        self.options = options
        self.branches = options.tree
        self.laws = (PointMass,) if options.tree else (Sampled,)
        self._depths = tuple(depths)
        self.needs = Needs(hidden_layers=HiddenLayers(tuple(sorted(set(self._depths)))))
        self._runner = runner
        longest = options.max_depth * (options.width if options.tree else 1)
        self._cache = KVCache(runner.num_layers, _SLOTS, target.max_length + longest)
        self._tail = longest
        if options.draft_vocab is not None and runner.odd_rows is not None:
            raise ConfigError(
                f"draft_vocab={options.draft_vocab!r}: keeps rows of the target's head, but what '{self.name}' drafts "
                f"with has {runner.odd_rows}; leave draft_vocab out"
            )
        vocabulary = draft_vocabulary.find(options.draft_vocab, target)
        self._columns = DraftColumns(target, vocabulary, target.vocab_size)
        self._top = min(options.width, runner.scored, len(self._columns)) if options.tree else 1
        self._unread = UnreadStates(target, self._cache, depths, final=final)
        self._ahead = ReadAhead[HeadPass]()

    def on_forward(self, features: Sequence[Features]) -> None:
        """Take the target's states: of rows that are committed in any case at once, of a draft's for a while."""
        full = [each for each in self._unread.show(features) if each[0].num_waiting >= _UNREAD_ROWS]
        if full:
            self._catch_up(full)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow one draft per request; every level is one pass of the head, but at temperature 0 all may be one call."""
        growing = []
        for context, budget in zip(contexts, budgets, strict=True):
            state = self._unread.get(context.request_id)
            depth = min(budget.max_depth, self.options.max_depth)
            if state is not None and budget.max_nodes > 0 and depth > 0 and self._begins(state, context):
                growing.append(_Builder(context, replace(budget, max_depth=depth), state=state))
        with torch.inference_mode():
            active = [draft for draft in growing if draft.pays(1.0, 1.0)]
            self._ahead = ReadAhead[HeadPass]()  # what was read for other drafts says nothing of these
            self._columns.begin([draft.context for draft in active])
            if self._grow_at_once(active):
                active = []
            while active:
                output, starts = self._read_ahead(active) or self._read(active)
                for draft, start in zip(active, starts, strict=True):
                    stop, own = start + len(draft.frontier), draft.budget.own_past
                    seen, first = self._columns.view(output, start, stop, draft.context, top=self._top, own=own)
                    if self.options.tree:
                        draft.record_level(seen, first, width=self.options.width, name=self.name)
                    else:
                        self._extend_chain(draft, seen, first)
                active = [draft for draft in active if draft.frontier]
        drafts = {draft.context.request_id: self._finish(draft) for draft in growing}
        return [drafts.get(context.request_id, NO_DRAFT) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The root's row and those of accepted nodes wait for the next draft."""
        self._columns.observe(outcomes)
        self._unread.settle(outcomes)

    def release(self, request_id: int) -> None:
        self._columns.release(request_id)
        self._unread.release(request_id)

    # ------------------------------------------------------------------ growing

    def _extend_chain(self, draft: _Builder, output: Output, row: int) -> None:
        node = draft.draw_if_it_pays(output, row, self.name)
        draft.expanded, draft.frontier = draft.frontier, []
        if node is not None and draft.has_room(node):
            draft.frontier = [node]

    def _grow_at_once(self, active: Sequence[_Builder]) -> bool:
        """Grow trees in one call, where that gives what recording them level by level gives."""
        runner = self._runner.ahead
        if runner is None or not self.options.tree or not active:
            return False
        if not all(
            draft.context.laws.trivial and self._columns.alone(draft.context, own=draft.budget.own_past)
            for draft in active
        ):
            return False
        batch = PackedBatch()
        features = [self._add_waiting(batch, draft) for draft in active]
        extents = [Extent(each.budget.max_nodes, each.budget.max_depth, each.budget.least_reach) for each in active]
        g_TW = features[0] if len(features) == 1 else torch.cat(features)
        grown = runner.trees(
            batch,
            self._cache,
            g_TW,
            extents=extents,
            width=self.options.width,
            top=self._top,
            rows=self._columns.rows,
        )
        for draft, tree in zip(active, grown, strict=True):
            self._commit_waiting(draft)
            if tree.odd:
                raise RequestError(no_numbers(self.name))
            for token, parent, share in zip(tree.tokens, tree.parents, tree.shares, strict=True):
                draft.add(token, parent, share, 0)
            draft.frontier = []
        return True

    def _finish(self, draft: _Builder) -> Draft:
        if self.options.tree:
            draft.rerank_what_pays()
        return draft.finish(Sampled)

    # ------------------------------------------------------------------ the head

    def _begins(self, state: Unread, context: Context) -> bool:
        """Whether all rows before the root are known; forgets a draft that was never judged."""
        state.shown = None
        rows, read = len(context.tokens) - 1, self._cache.lengths[state.slot]
        if read == rows > 0 and not state.num_waiting and state.last is not None:
            # asked again about the same root: the last pair gives its law once more
            self._cache.rollback(state.slot, rows - 1)
            return True
        return state.num_waiting > 0 and read + state.num_waiting == rows

    def _read_ahead(self, active: Sequence[_Builder]) -> tuple[Output, list[int]] | None:
        """What :meth:`_read` would give, if it was read already."""
        found = self._ahead.next(active)
        if found is None:
            return None
        made, rows = found
        for draft, row in zip(active, rows, strict=True):
            draft.following_MW = made.following_MW[row : row + 1]
            draft.rows[draft.frontier[0]] = len(draft.rows)
        return made.output, rows

    def _read(self, active: Sequence[_Builder]) -> tuple[Output, list[int]]:
        """One forward of the head over each draft's frontier, behind what waits.

        Returns:
            the output, and the row in it of each draft's first frontier node.
        """
        batch, features, starts = PackedBatch(), [], []
        for draft in active:
            starts.append(len(batch.wanted))
            state = draft.state
            prefix = self._cache.lengths[state.slot]
            if draft.frontier == [ROOT]:
                features.append(self._add_waiting(batch, draft))
                continue
            features.append(draft.features())
            tail = len(draft.rows)
            tokens = [draft.tokens[node] for node in draft.frontier]
            if draft.chain:  # a chain's tail is as good as a prefix
                batch.add_chunk(state.slot, prefix + tail, tokens, wanted=1)
            else:
                batch.add_level(
                    state.slot,
                    prefix,
                    tokens,
                    depths=[draft.depths[node] - 1 for node in draft.frontier],
                    tail=tail,
                    tail_depths=[draft.depths[node] - 1 for node in draft.rows],
                    ancestors=[[draft.rows[each] for each in draft.ancestors(node)] for node in draft.frontier],
                )
            for node in draft.frontier:
                draft.rows[node] = len(draft.rows)
        g_TW = features[0] if len(features) == 1 else torch.cat(features)
        output, following_MW = self._forward(active, batch, g_TW)
        for draft, start in zip(active, starts, strict=True):
            draft.following_MW = following_MW[start : start + len(draft.frontier)]
            if draft.frontier == [ROOT]:
                self._commit_waiting(draft)
        return output, starts

    def _add_waiting(self, batch: PackedBatch, draft: _Builder) -> Tensor:
        """Add the pairs that wait, of which the last one gives the first law; returns their features."""
        state = draft.state
        prefix = self._cache.lengths[state.slot]
        tokens = draft.context.tokens[prefix + 1 :]
        if state.num_waiting:
            g_TW = self._runner.features(state.take(state.num_waiting))
            state.last = g_TW[-1:].clone()
        else:
            assert state.last is not None
            g_TW = state.last
        self._cache.reserve(state.slot, len(tokens) + self._tail)
        batch.add_chunk(state.slot, prefix, tokens, wanted=1)
        return g_TW

    def _commit_waiting(self, draft: _Builder) -> None:
        """What was added has been read."""
        slot = draft.state.slot
        self._cache.commit(slot, range(len(draft.context.tokens) - 1 - self._cache.lengths[slot]))

    def _forward(self, active: Sequence[_Builder], batch: PackedBatch, g_TW: Tensor) -> tuple[Output, Tensor]:
        """One pass; what it is foreseen to be followed by is read ahead."""
        rows = self._columns.rows
        runner = self._runner.ahead
        scored = self._runner.scored if rows is None else len(rows)
        ahead = foreseen(active, scored) if runner is not None and not self.options.tree else []
        if runner is None or not ahead:
            return self._runner.forward(batch, self._cache, g_TW, top=self._top, rows=rows)
        first, *others = runner.passes(batch, self._cache, g_TW, top=self._top, rows=rows, ahead=ahead)
        self._ahead.keep(others, active)
        return first.output, first.following_MW

    def _catch_up(self, waiting: Sequence[tuple[Unread, Context]]) -> None:
        """Read what waits and has its token, without the head's rows."""
        batch, features, counts = PackedBatch(), [], []
        for state, context in waiting:
            begin = self._cache.lengths[state.slot]
            count = min(state.num_waiting, len(context.tokens) - 1 - begin)
            g_TW = self._runner.features(state.take(count))
            state.last = g_TW[-1:].clone()
            self._cache.reserve(state.slot, count)
            batch.add_chunk(state.slot, begin, context.tokens[begin + 1 : begin + 1 + count], wanted=0)
            features.append(g_TW)
            counts.append(count)
        self._runner.forward(batch, self._cache, torch.cat(features), top=0)
        for (state, _), count in zip(waiting, counts, strict=True):
            self._cache.commit(state.slot, range(count))
