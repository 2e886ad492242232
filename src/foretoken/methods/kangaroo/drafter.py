"""Kangaroo: the target's first layers and a small adapter draft, the other layers verify.

    f = layers[0, E)(token)       first exit: keys and values of these layers are kept for verification
    y = adapter(f)                one attention layer with a cache of its own
    q = softmax(head(y))          the target's head
    stop when max q <= threshold  second exit; the uncertain token is verified, too

Letters: T packed rows, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, HiddenLayers, Needs, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.core.tree import ROOT
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.early_exit import EarlyExit, EarlyExitBuilder
from foretoken.drafting.feature_heads.pending_states import Pending
from foretoken.drafting.learned_part import find_all
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.kangaroo.exit_choice import choose_exit
from foretoken.methods.kangaroo.network import Adapter
from foretoken.methods.kangaroo.runner import AdapterRunner
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Checked, Option

_SLOTS = 1024  # maximum number of requests at once; buffers grow with use
_CHUNK_ROWS = 512  # rows of an adapter forward without the head


@dataclass(slots=True)
class _State(Pending):
    """One request: its slot in the adapter's cache, and committed rows that the adapter has not read yet."""

    drafted: EarlyExitBuilder | None = None  # the draft without a verdict
    num_adapted: int = 0  # number of its nodes that the adapter has read


class KangarooDrafter(Drafter):
    """Drafts with layers [0, E) of the target, an adapter and the target's head.

    Paper:   arXiv:2404.18911: chain drafting with two early exits; the tree is that of its NeurIPS 2024 version. The
             order of expansion was not published; ours takes, level by level, the ``width`` best nodes by cumulative
             probability, and expands a node if its best continuation is more probable than the threshold.
    Exact:   chains carry the q of their samples (a point mass at temperature 0), trees are point masses; the stop
             depends only on distributions before a sample, and every drafted token is verified. Lossless under any
             lossless verifier of these draft kinds.
    Differs: batches (requests stop drafting one by one); sampling; no drafts where plain decoding was faster; the
             adapter reads committed rows when a draft is requested: until then the exit's hidden states are kept, at
             least half the memory of one layer's keys and values.
    """

    name = "kangaroo"
    laws: tuple[type[Law], ...] = (Sampled,)
    offers = Offers(resumes=True)
    declared = Declared(
        learned_part="foretoken.methods.kangaroo.network:Adapter",
        variants=(
            Variant(options={"threshold": 0.2}),
            Variant(options={"threshold": 0.1, "tree": True, "width": 4}, laws=(PointMass,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of Kangaroo."""

        adapter: Annotated[
            str | Path | None,
            Option(
                "A folder of `foretoken train kangaroo`, or one with a folder exit-E for each of several depths; None: "
                "`kangaroo` in the folder of the target's weights."
            ),
        ] = None
        exit_layer: Annotated[
            int | str | None,
            Option(
                "Layers that draft; 'auto' measures every available adapter and explains its choice. None: the only "
                "adapter, or of several the one with a depth nearest to an eighth of the target.",
                least=1,
                choices=("auto",),
            ),
        ] = None
        threshold: Annotated[
            float | None,
            Option(
                "Drafting stops if the most probable token has at most this probability; None: 0.6 for chains, 0.4 "
                "for trees. 0 never stops, 1 drafts one token a step.",
                least=0,
                most=1,
            ),
        ] = None
        tree: Annotated[bool, Option("Propose a tree of the most probable continuations instead of a chain.")] = False
        max_depth: Annotated[int, Option("Longest path of a draft.", least=1, most=64)] = 6
        width: Annotated[
            int, Option("Of a tree: maximum continuations of a node, and nodes of a level.", least=1, most=64)
        ] = 10
        draft_vocab: Annotated[str | Path | None, draft_vocabulary.OPTION] = None

    def __init__(self, config: Config, target: LanguageModel) -> None:
        self.config = config
        self.early_exit = EarlyExit(target)
        adapter, self.explanation = _adapter(config, target)  # the command line prints it
        self.exit_layer = adapter.config.exit_layer
        self.threshold = config.threshold if config.threshold is not None else 0.4 if config.tree else 0.6
        self.branches = config.tree
        self.laws = (PointMass,) if config.tree else (Sampled,)
        self.needs = Needs(hidden_layers=HiddenLayers((self.exit_layer,)))
        self._most = 60 if config.tree else config.max_depth
        self.offers = Offers(evidence=(GreedyLaws,), length=self._most, resumes=True)
        self._head = AdapterRunner(target, adapter)
        self._cache = KVCache(1, _SLOTS, target.max_length)
        self._columns = DraftColumns(target, draft_vocabulary.find(config.draft_vocab, target), target.vocab_size)
        self._top = min(config.width, len(self._columns)) if config.tree else 1
        self._states: dict[int, _State] = {}

    def attach(self, cache: Any) -> None:
        self.early_exit.attach(cache)

    def on_forward(self, features: Sequence[Features]) -> None:
        """Keep the hidden states of committed rows until the adapter reads them."""
        for each in features:
            if each.draft.resume is not None:
                continue
            state = self._states.get(each.context.request_id)
            if state is None:
                if each.begin or not self._cache.free_slots:  # no drafts for a request without its first rows
                    continue
                state = self._states[each.context.request_id] = _State(self._cache.acquire())
            known = self._cache.lengths[state.slot] + state.num_rows
            state.add(each.hidden[self.exit_layer][max(0, known - each.begin) :])

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow one draft per request; a level is one forward of the first layers and one of the adapter."""
        growing: list[tuple[EarlyExitBuilder, _State]] = []
        for context, budget in zip(contexts, budgets, strict=True):
            state = self._states.get(context.request_id)
            depth = min(budget.max_depth, self.config.max_depth)
            if state is not None and budget.max_nodes > 0 and depth > 0:
                self._rewind(state, context)
                self._catch_up(state)
                bounded = replace(budget, max_nodes=min(budget.max_nodes, self._most), max_depth=depth, stop_rule=None)
                growing.append((EarlyExitBuilder(context, bounded), state))
        with torch.inference_mode():
            self._columns.begin([draft.context for draft, _ in growing])
            active = growing
            while active:
                self.early_exit.read([draft for draft, _ in active], self.exit_layer, (self.exit_layer,), scored=False)
                active = [(draft, state) for draft, state in active if draft.frontier]
                if active:
                    self._expand(active)
                active = [(draft, state) for draft, state in active if len(draft.unread)]
        drafts = {draft.context.request_id: self._finish(draft, state) for draft, state in growing}
        return [drafts.get(context.request_id, NO_DRAFT) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the adapter's rows of accepted nodes; queue the accepted nodes that it has not read."""
        self._columns.observe(outcomes)
        for outcome in outcomes:
            state = self._states.get(outcome.request_id)
            if state is None or state.drafted is None:
                continue
            path = outcome.verdict.path
            self._cache.commit(state.slot, [node for node in path if node < state.num_adapted])
            late = [1 + node for node in path if node >= state.num_adapted]
            if late:
                state.add(state.drafted.hidden(self.exit_layer)[late])
            state.drafted = None

    def release(self, request_id: int) -> None:
        self._columns.release(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            self._cache.release(state.slot)

    # ------------------------------------------------------------------ growing

    def _expand(self, active: Sequence[tuple[EarlyExitBuilder, _State]]) -> None:
        """Read the newest rows with the adapter and expand the frontier."""
        output, starts = self._adapt(active)
        for (draft, _), start in zip(active, starts, strict=True):
            stop = start + len(draft.frontier)
            seen, first = self._columns.view(
                output, start, stop, draft.context, top=self._top, own=draft.budget.history_only
            )
            if self.config.tree:
                self._extend_tree(draft, seen, first)
            else:
                self._extend_chain(draft, seen, first)

    def _extend_chain(self, draft: EarlyExitBuilder, output: Output, row: int) -> None:
        confidence = output.top_shares[row]
        node = draft.draw(output, row, self.name)
        goes_on = node is not None and confidence > self.threshold and draft.has_room(node)
        draft.frontier = [node] if node is not None and goes_on else []

    def _extend_tree(self, draft: EarlyExitBuilder, output: Output, first: int) -> None:
        def expands(parent: int, best: float) -> bool:
            return parent == ROOT or best > self.threshold

        draft.extend_tree(output, first, width=self.config.width, name=self.name, expands=expands)

    def _finish(self, draft: EarlyExitBuilder, state: _State) -> Draft:
        if not draft.tokens:
            return NO_DRAFT
        state.drafted = draft
        return draft.finish(Sampled, draft.resume_point(self.exit_layer))

    # ------------------------------------------------------------------ the adapter

    def _adapt(self, active: Sequence[tuple[EarlyExitBuilder, _State]]) -> tuple[Output, list[int]]:
        """Run adapter and head over the queued rows, then each draft's newest rows.

        Returns:
            the output, and for each draft the row of its first frontier node.
        """
        batch, rows, starts = PackedBatch(), [], []
        for draft, state in active:
            fresh_TD = draft.kept[-1][self.exit_layer]
            starts.append(len(batch.wanted))
            prefix = self._cache.lengths[state.slot]
            if draft.frontier == [ROOT]:
                rows += [*state.states, fresh_TD]
                count = state.num_rows + 1
                self._cache.reserve(state.slot, count + draft.budget.max_nodes)
                batch.add_chunk(state.slot, prefix, [0] * count, wanted=1)
                continue
            rows.append(fresh_TD)
            tail = state.num_adapted
            if draft.chain:
                batch.add_chunk(state.slot, prefix + tail, [0] * len(fresh_TD), wanted=len(fresh_TD))
            else:
                draft.add_frontier(batch, state.slot, prefix, [0] * len(fresh_TD), range(tail))
        hidden_TD = rows[0] if len(rows) == 1 else torch.cat(rows)
        output = self._head.forward(batch, self._cache, hidden_TD, top=self._top, head=self._columns.rows)
        for draft, state in active:
            if draft.frontier == [ROOT]:
                self._cache.commit(state.slot, range(state.num_rows + 1))
                state.states, state.num_rows = [], 0
            else:
                state.num_adapted += len(draft.frontier)
        return output, starts

    def _catch_up(self, state: _State) -> None:
        """Read queued rows in whole chunks, without the head; the remainder is read together with the root."""
        with torch.inference_mode():
            while state.num_rows >= _CHUNK_ROWS:
                batch = PackedBatch()
                self._cache.reserve(state.slot, _CHUNK_ROWS)
                batch.add_chunk(state.slot, self._cache.lengths[state.slot], [0] * _CHUNK_ROWS, wanted=0)
                self._head.forward(batch, self._cache, state.take(_CHUNK_ROWS), top=0)
                self._cache.commit(state.slot, range(_CHUNK_ROWS))

    def _rewind(self, state: _State, context: Context) -> None:
        """Drop a draft without a verdict, and the adapter's row of its root, which is read again."""
        state.drafted, state.num_adapted = None, 0
        self._cache.rollback(state.slot, self._cache.reachable(state.slot, len(context.tokens) - 1))


def _adapter(config: KangarooDrafter.Config, target: LanguageModel) -> tuple[Adapter, str]:
    """Return the configured adapter, checked against the target, and the reason for a measured choice."""
    depth = config.exit_layer
    found = {adapter.config.exit_layer: adapter for adapter in find_all(Adapter, config.adapter, target)}
    if depth == "auto":
        return choose_exit(target, found)
    if isinstance(depth, int) and depth >= target.num_layers:
        raise ConfigError(
            f"exit_layer={depth} is out of range: '{target.name}' has {target.num_layers} layers, "
            f"so 1 to {target.num_layers - 1} can draft"
        )
    if isinstance(depth, int) and depth not in found:
        place = config.adapter or Path(target.source, Adapter.algorithm)
        raise ConfigError(
            f"exit_layer={depth}: there is no adapter for it in {place}, only for "
            f"{', '.join(map(str, sorted(found)))}; make one with 'foretoken train kangaroo --target {target.name} "
            f"--exit-layer {depth} --out DIR'"
        )
    if isinstance(depth, int):
        return found[depth], ""
    return found[min(found, key=lambda depth: (abs(depth - target.num_layers / 8), depth))], ""
