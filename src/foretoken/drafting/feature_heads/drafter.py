"""The drafter of all networks over pairs: reads pairs as the target computes them, grows drafts from own outputs.

    rows known    0 .. n-1           the target's, with their states; token n is the root
    pairs read    0 .. n-1           pair i = (feature of row i, token i + 1); the last one gives the first distribution
    drafting      pair n-1+t         (own output of the row before, drafted token): never kept
    next step     root and accepted rows come with the target's states, and are read again from these

So the cache always equals that of reading the target's states from the beginning.

Letters: T rows, M wanted rows, F width of the fused depths, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.needs import HiddenLayers, Needs, Offers
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome, Verifier
from foretoken.core.tree import ROOT
from foretoken.drafting import draft_vocabulary, learned_part
from foretoken.drafting.draft_builder import no_numbers
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.feature_heads.native.checks import Extent
from foretoken.drafting.feature_heads.pending_states import Pending, PendingStates
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.level_tree import DRAWN, extend_chain, extend_drawn, grow_levels
from foretoken.drafting.prefetch import Prefetched, prefetch_plan
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.quantised.rounding import SCHEMES
from foretoken.options.option import Checked, Option

_SLOTS = 1024  # requests at once, at most; buffers grow with use
_PENDING_ROWS = 512  # of a prompt; more are read at once


@dataclass(slots=True)
class _Builder(RerankedBuilder):
    """A draft while it grows.

    Attributes:
        rows: tail row of each node that was read.
        following_MW: features recycled from this draft's rows of the last forward.
        first_row: of a chain that is drafted in one pass, in the output of that.
    """

    state: Pending = field(kw_only=True)
    rows: dict[int, int] = field(default_factory=dict)
    following_MW: Tensor | None = None
    first_row: int = 0

    def features(self) -> Tensor:
        """[frontier, W]: the features of the frontier's pairs, recycled from the outputs of its nodes' parents."""
        assert self.following_MW is not None
        if len(self.expanded) == len(self.frontier) == 1:
            return self.following_MW
        place = {node: row for row, node in enumerate(self.expanded)}
        return self.following_MW[[place[self.parents[node]] for node in self.frontier]]


TREE = Option("Propose a tree of the most probable continuations instead of a chain.")


@dataclass(frozen=True, kw_only=True)
class GrowthOptions(Checked):
    """Options of every such drafter."""

    tree: Annotated[bool, TREE] = False
    max_depth: Annotated[int, Option("Longest path of a draft.", least=1, most=64)] = 6
    width: Annotated[
        int, Option("Of a tree: continuations recorded at a node, and nodes expanded at a level.", least=1, most=64)
    ] = 8
    draft_vocab: Annotated[str | Path | None, draft_vocabulary.OPTION] = None


@dataclass(frozen=True, kw_only=True)
class HeadOptions(GrowthOptions):
    """Options of a drafter with a network in a folder."""

    draw: Annotated[
        str | None,
        Option(
            "Of a tree above temperature 0: how children are drawn, `width` of each node; None: none are, but for a "
            "verifier that needs it.",
            choices=tuple(DRAWN),
        ),
    ] = None
    head: Annotated[str | Path | None, learned_part.FOLDER] = None
    dtype: Annotated[
        str | None,
        Option(
            "int8 or int4 rounds the network for the native decoder: faster drafts, the same text; None: the target's.",
            choices=tuple(SCHEMES),
        ),
    ] = None

    def check_together(self) -> None:
        if self.draw is not None and not self.tree:
            raise ConfigError(f"draw={self.draw!r} with tree=False: a chain is drawn in any case; leave one out")


class FeatureDrafter(Drafter):
    """Drafts with a network over the target's hidden states; a subclass finds the network.

    Exact: chains and drawn trees carry the q they were drawn from (a point mass at temperature 0), other trees are
    point masses; a token that neither network nor draft vocabulary score has q = 0. Lossless under any lossless
    verifier that knows the kind.

    Args:
        options: of the drafts.
        target: the model that is read.
        runner: of the network.
        taps: the states that are read; None: a subclass hands them over.
        masks: token and feature, [1, W], of the mask rows by which the network drafts a chain in one pass; None: each
            row follows the one before it.
        draw: how a tree's children are drawn; None: they are the most probable ones.
    Raises:
        ConfigError: a draft vocabulary is given, and the target's whole LM head does not score.
        ModelError, MismatchError: the draft vocabulary is missing, damaged, or of another tokenizer.
        UnsupportedArchitecture: the target does more to hidden states than a linear LM head.
    """

    laws: tuple[type[Law], ...] = (Sampled,)
    offers = Offers(evidence=(GreedyLaws,))

    @classmethod
    def settle(cls, config: Any, verifier: Verifier | None) -> Any:
        """A tree is drawn for a verifier of drawn trees."""
        if not isinstance(config, HeadOptions) or not config.tree or config.draw is not None or verifier is None:
            return config
        fits = [] if PointMass in verifier.laws else [name for name, kind in DRAWN.items() if kind in verifier.laws]
        return replace(config, draw=fits[0]) if fits else config

    def __init__(
        self,
        options: GrowthOptions,
        target: LanguageModel,
        runner: Runner,
        taps: Taps | None,
        masks: tuple[int, Tensor] | None = None,
        draw: str | None = None,
    ) -> None:
        self.options, self._masks = options, masks
        self.branches = options.tree
        self._drawn = DRAWN[draw] if draw is not None else None if options.tree else Sampled
        self.laws = (self._drawn or PointMass,)
        self._depths = () if taps is None else taps.of(target.num_layers)
        self.needs = Needs(hidden_layers=HiddenLayers(tuple(sorted(set(self._depths)))))
        self._runner = runner
        longest = options.max_depth * (options.width if options.tree else 1)
        self._cache = KVCache(runner.num_layers, _SLOTS, target.max_length + longest)
        self._tail = longest
        if options.draft_vocab is not None and runner.own_rows is not None:
            raise ConfigError(
                f"draft_vocab={options.draft_vocab!r}: keeps rows of the target's head, but the draft network of "
                f"'{self.name}' has {runner.own_rows}; leave draft_vocab out"
            )
        vocabulary = draft_vocabulary.find(options.draft_vocab, target)
        self._columns = DraftColumns(target, vocabulary, target.vocab_size)
        self._top = min(options.width, runner.num_scored, len(self._columns)) if options.tree else 1
        self._pending = PendingStates(target, self._cache, taps)
        self._prefetched = Prefetched()
        self._filled: Output  # of the last pass with mask rows

    def on_forward(self, features: Sequence[Features]) -> None:
        """Take the target's states; a long queue is read at once."""
        full = [each for each in self._pending.receive(features) if each[0].num_rows >= _PENDING_ROWS]
        if full:
            self._catch_up(full)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow one draft per request; a level is one pass of the network, but at temperature 0 all may be one call."""
        growing = []
        for context, budget in zip(contexts, budgets, strict=True):
            state = self._pending.get(context.request_id)
            depth = min(budget.max_depth, self.options.max_depth)
            if state is not None and budget.max_nodes > 0 and depth > 0 and self._begins(state, context):
                growing.append(_Builder(context, replace(budget, max_depth=depth), state=state))
        with torch.inference_mode():
            active = [draft for draft in growing if draft.pays(1.0, 1.0)]
            self._prefetched = Prefetched()  # passes of other drafts do not fit these
            self._columns.begin([draft.context for draft in active])
            if not self._grow_at_once(active):
                grow_levels(active, self._read, self._columns, self._extend, top=self._top)
        drafts = {draft.context.request_id: self._finish(draft) for draft in growing}
        return [drafts.get(context.request_id, NO_DRAFT) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of the root and of accepted nodes become pending."""
        self._columns.observe(outcomes)
        self._pending.settle(outcomes)

    def release(self, request_id: int) -> None:
        self._columns.release(request_id)
        self._pending.release(request_id)

    # ------------------------------------------------------------------ growing

    def _extend(self, draft: _Builder, output: Output, first: int) -> None:
        """Record a level of the tree, or draw a chain's next token."""
        drawn = self._drawn is not None and not draft.context.params.greedy
        if self.options.tree and not drawn:
            draft.record_level(output, first, width=self.options.width, name=self.name)
            return
        draft.expanded = draft.frontier
        if self.options.tree and self._drawn is not None:
            extend_drawn(draft, output, first, self._drawn, count=self.options.width, name=self.name)
        else:
            extend_chain(draft, output, first, self.name)

    def _grow_at_once(self, active: Sequence[_Builder]) -> bool:
        """Grow trees in one call, where the result equals that of recording them level by level."""
        runner = self._runner.several
        if runner is None or not self.options.tree or not active:
            return False
        if not all(
            draft.context.laws.trivial and self._columns.alone(draft.context, own=draft.budget.history_only)
            for draft in active
        ):
            return False
        batch = PackedBatch()
        features = [self._add_pending(batch, draft) for draft in active]
        extents = [Extent(each.budget.max_nodes, each.budget.max_depth, each.budget.least_reach) for each in active]
        g_TW = features[0] if len(features) == 1 else torch.cat(features)
        grown = runner.trees(
            batch, self._cache, g_TW, extents=extents, width=self.options.width, top=self._top, rows=self._columns.rows
        )
        for draft, tree in zip(active, grown, strict=True):
            self._commit_pending(draft)
            if tree.damaged:
                raise RequestError(no_numbers(self.name))
            for token, parent, share in zip(tree.tokens, tree.parents, tree.shares, strict=True):
                draft.add(token, parent, share, 0)
            draft.frontier = []
        return True

    def _finish(self, draft: _Builder) -> Draft:
        if self.options.tree and not draft.q_rows:
            draft.rerank()
        return draft.finish(self._drawn or PointMass)

    # ------------------------------------------------------------------ the network

    def _begins(self, state: Pending, context: Context) -> bool:
        """Whether all rows before the root are known; drops a draft that was never verified."""
        state.unverified = None
        rows, read = len(context.tokens) - 1, self._cache.lengths[state.slot]
        if read == rows > 0 and not state.num_rows and state.last is not None:
            # a second draft for the same root: the last pair gives its distribution once more
            self._cache.rollback(state.slot, rows - 1)
            return True
        return state.num_rows > 0 and read + state.num_rows == rows

    def _read(self, active: Sequence[_Builder]) -> tuple[Output, list[int]]:
        """Score the frontiers; returns the output, and the row in it of each draft's first frontier node."""
        if self._masks is not None:
            return self._masked_pass(active)
        return self._prefetched_pass(active) or self._pass(active)

    def _masked_pass(self, active: Sequence[_Builder]) -> tuple[Output, list[int]]:
        """One forward for all rows of chains, of which the later levels read on."""
        if active[0].frontier == [ROOT]:
            batch, features = PackedBatch(), []
            for draft in active:
                draft.first_row = len(batch.wanted)
                features.append(self._add_pending(batch, draft))
            self._filled, _ = self._forward(active, batch, torch.cat(features))
            for draft in active:
                self._commit_pending(draft)
        return self._filled, [draft.first_row + len(draft.tokens) for draft in active]

    def _prefetched_pass(self, active: Sequence[_Builder]) -> tuple[Output, list[int]] | None:
        """The result of :meth:`_pass`, if an earlier call computed it."""
        found = self._prefetched.next(active)
        if found is None:
            return None
        made, rows = found
        assert made.following_MW is not None
        for draft, row in zip(active, rows, strict=True):
            draft.following_MW = made.following_MW[row : row + 1]
            draft.rows[draft.frontier[0]] = len(draft.rows)
        return made.output, rows

    def _pass(self, active: Sequence[_Builder]) -> tuple[Output, list[int]]:
        """One forward of the network over each draft's frontier, or over the pending pairs of a new draft."""
        batch, features, starts = PackedBatch(), [], []
        for draft in active:
            starts.append(len(batch.wanted))
            state = draft.state
            prefix = self._cache.lengths[state.slot]
            if draft.frontier == [ROOT]:
                features.append(self._add_pending(batch, draft))
                continue
            features.append(draft.features())
            tail = len(draft.rows)
            tokens = [draft.tokens[node] for node in draft.frontier]
            if draft.chain:  # a chain's tail is read like a prefix
                batch.add_chunk(state.slot, prefix + tail, tokens, wanted=1)
            else:
                draft.add_frontier(batch, state.slot, prefix, tokens, draft.rows)
            for node in draft.frontier:
                draft.rows[node] = len(draft.rows)
        g_TW = features[0] if len(features) == 1 else torch.cat(features)
        output, following_MW = self._forward(active, batch, g_TW)
        for draft, start in zip(active, starts, strict=True):
            draft.following_MW = following_MW[start : start + len(draft.frontier)]
            if draft.frontier == [ROOT]:
                self._commit_pending(draft)
        return output, starts

    def _add_pending(self, batch: PackedBatch, draft: _Builder) -> Tensor:
        """Add the pending pairs, the last of which gives the first distribution; returns their features."""
        state = draft.state
        prefix = self._cache.lengths[state.slot]
        tokens = draft.context.tokens[prefix + 1 :]
        if state.num_rows:
            g_TW = self._runner.features(state.take(state.num_rows))
            state.last = g_TW[-1:].clone()
        else:
            assert state.last is not None
            g_TW = state.last
        self._cache.reserve(state.slot, len(tokens) + self._tail)
        wanted = 1
        if self._masks is not None:
            mask, feature_1W = self._masks
            wanted = min(draft.budget.max_nodes, draft.budget.max_depth)
            tokens = [*tokens, *[mask] * (wanted - 1)]
            g_TW = torch.cat([g_TW, feature_1W.expand(wanted - 1, -1)])
        batch.add_chunk(state.slot, prefix, tokens, wanted=wanted)
        return g_TW

    def _commit_pending(self, draft: _Builder) -> None:
        """Commit the pairs that were added."""
        slot = draft.state.slot
        self._cache.commit(slot, range(len(draft.context.tokens) - 1 - self._cache.lengths[slot]))

    def _forward(self, active: Sequence[_Builder], batch: PackedBatch, g_TW: Tensor) -> tuple[Output, Tensor]:
        """One pass, with the prefetched passes of chains that are likely to go on."""
        rows = self._columns.rows
        runner = self._runner.several
        scored = self._runner.num_scored if rows is None else len(rows)
        alone = self.options.tree or self._masks is not None
        prefetch = [] if runner is None or alone else prefetch_plan(active, scored)
        if runner is None or not prefetch:
            return self._runner.forward(batch, self._cache, g_TW, top=self._top, rows=rows)
        first, *others = runner.passes(batch, self._cache, g_TW, top=self._top, rows=rows, prefetch=prefetch)
        self._prefetched.keep(others, active)
        assert first.following_MW is not None
        return first.output, first.following_MW

    def _catch_up(self, longer: Sequence[tuple[Pending, Context]]) -> None:
        """Read the pending rows that have a next token, without scoring them."""
        batch, features, counts = PackedBatch(), [], []
        for state, context in longer:
            begin = self._cache.lengths[state.slot]
            count = min(state.num_rows, len(context.tokens) - 1 - begin)
            g_TW = self._runner.features(state.take(count))
            state.last = g_TW[-1:].clone()
            self._cache.reserve(state.slot, count)
            batch.add_chunk(state.slot, begin, context.tokens[begin + 1 : begin + 1 + count], wanted=0)
            features.append(g_TW)
            counts.append(count)
        self._runner.forward(batch, self._cache, torch.cat(features), top=0)
        for (state, _), count in zip(longer, counts, strict=True):
            self._cache.commit(state.slot, range(count))
