"""LongSpec: one block with a short window of its own and the target's last KV cache drafts a chain or a tree.

    ring      keys and values of the last 512 tokens before the root             functions of the tokens alone
    level 1   the root attends to the ring, and to the target's P committed keys            gap 1
    level j   nodes at position P + j - 1 attend to ring, ancestors, and the same P keys    gap j
    step      the target commits the accepted tokens; the next ``propose`` writes them into the ring

A draft leaves no rows in the ring, and only the last 512 tokens of a prompt are read.

Read in this order: network.py (the paper's forward pass), this file, runner.py (a level of many requests at once).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken.core.tree import ROOT
from foretoken.drafting import draft_vocabulary, learned_part
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.learned_part import find
from foretoken.drafting.level_tree import extend_chain, grow_levels
from foretoken.drafting.prefetch import Prefetched, prefetch_plan
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.drafting.ring import Ring
from foretoken.forward import target_kv
from foretoken.forward.cache import KVCache
from foretoken.methods.longspec.network import LongSpec
from foretoken.methods.longspec.runner import Level, Runner
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Checked, Option


@dataclass(slots=True)
class _Builder(RerankedBuilder):
    """A growing draft.

    Attributes:
        slot: slot of the ring.
        rows: root or node -> its row after the ring's tokens, if it was read.
    """

    slot: int = field(kw_only=True)
    rows: dict[int, int] = field(default_factory=dict)


class LongSpecDrafter(Drafter):
    """Drafts with one block that reads the keys and values of the target's last layer of full attention.

    Paper:   arXiv:2502.17421: the network (section 3.1), the beam of widths 4, 16, 16, 16, 16 (section 3.3).
    Exact:   chains carry the q of their samples (a point mass at temperature 0), trees are point masses, although
             the released code treats them as samples. Lossless under any lossless verifier of these draft kinds.
    Differs: chains, which are the default; batches; of a beam, the most probable paths up to the node budget; the
             window counts positions, for all nodes of a level; no token is read twice, because keys and values depend
             on id and position and stay in the ring.
    """

    name = "longspec"
    laws: tuple[type[Law], ...] = (Sampled,)
    offers = Offers(evidence=(GreedyLaws,))
    declared = Declared(
        learned_part="foretoken.methods.longspec.network:LongSpec",
        variants=(
            Variant(),
            Variant(options={"tree": True, "width": 8, "max_depth": 4}, laws=(PointMass,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of LongSpec."""

        head: Annotated[str | Path | None, learned_part.FOLDER] = None
        tree: Annotated[bool, Option("Propose a beam of the most probable continuations instead of a chain.")] = False
        max_depth: Annotated[
            int | None, Option("Longest path of a draft; None: the number of levels in training.", least=1, most=64)
        ] = None
        width: Annotated[
            int, Option("Of a tree: nodes of a level; the first level has a quarter of them.", least=1, most=64)
        ] = 16
        draft_vocab: Annotated[str | Path | None, draft_vocabulary.OPTION] = None

    def __init__(self, config: Config, target: LanguageModel) -> None:
        target_kv.find(target.model, target.name)  # refuse an unsuitable target before loading the head
        head = find(LongSpec, config.head, target)
        self.config = config
        self.branches = config.tree
        self.laws = (PointMass,) if config.tree else (Sampled,)
        self._depth = config.max_depth or head.config.levels
        self._longest = head.config.max_length
        self._target = target
        # spare rows: the root and all nodes to read
        spare = 1 + (self._depth - 1) * (config.width if config.tree else 1)
        self.ring = Ring(
            head.config.seen - 1, spare, head.config.kv_heads, head.config.head_dim, target.dtype, target.device
        )
        self._runner = Runner(target, head, self.ring)
        if head.own_head is not None and config.draft_vocab is not None:
            raise ConfigError(
                f"draft_vocab={config.draft_vocab!r}: the head for '{target.name}' has its own vocabulary; "
                "leave draft_vocab out"
            )
        self._columns = DraftColumns(target, draft_vocabulary.find(config.draft_vocab, target), target.vocab_size)
        self._top = min(config.width, len(self._columns)) if config.tree else 1
        self._states: dict[int, int] = {}  # request -> slot of the ring
        self._prefetched = Prefetched()
        self._target_cache: KVCache | None = None

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target.

        Raises:
            ConfigError: the cache does not store the keys of committed tokens, or stores only codes of them.
        """
        if not cache.keeps_keys:
            kept = "codes of them" if self._target.kv_cache_dtype == "int8" else "a state instead"
            raise ConfigError(
                f"method '{self.name}' reads the target's keys and values, but the cache of '{self._target.name}' "
                f"keeps {kept}: choose another method"
            )
        self._target_cache = cache

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow one draft per request: a forward of the block for each level, or one native call for a whole chain."""
        growing = []
        with torch.inference_mode():
            for context, budget in zip(contexts, budgets, strict=True):
                # no drafts beyond the trained positions
                depth = min(budget.max_depth, self._depth, self._longest - len(context.tokens))
                if budget.max_nodes > 0 and depth > 0:
                    growing.append(_Builder(context, replace(budget, max_depth=depth), slot=self._slot(context)))
            active = [draft for draft in growing if draft.pays(1.0, 1.0)]
            self._prefetched = Prefetched()  # passes prefetched for earlier drafts are useless
            self._columns.begin([draft.context for draft in active])
            for draft in active:
                self._fill(draft)
            grow_levels(active, self._read, self._columns, self._extend, top=self._top)
        drafts = {draft.context.request_id: self._finish(draft) for draft in growing}
        return [drafts.get(context.request_id, NO_DRAFT) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._columns.observe(outcomes)

    def release(self, request_id: int) -> None:
        self._columns.release(request_id)
        slot = self._states.pop(request_id, None)
        if slot is not None:
            self.ring.release(slot)

    # ------------------------------------------------------------------ growing

    def _extend(self, draft: _Builder, output: Output, first: int) -> None:
        """Record a level of the beam, a quarter as wide at the root (section 3.3), or sample a chain's next token."""
        if self.config.tree:
            width = -(-self.config.width // 4) if draft.frontier == [ROOT] else self.config.width
            draft.record_beam(output, first, width=width, name=self.name)
        else:
            extend_chain(draft, output, first, self.name)

    def _prefetched_pass(self, active: Sequence[_Builder]) -> tuple[Output, list[int]] | None:
        """Return the output of an earlier call for these frontiers, and the first row of each, if it was prefetched."""
        found = self._prefetched.next(active)
        if found is None:
            return None
        for draft in active:
            draft.rows[draft.frontier[0]] = len(draft.rows)
        return found[0].output, found[1]

    def _read(self, active: Sequence[_Builder]) -> tuple[Output, list[int]]:
        """Score the frontiers: one level, or for a chain all levels that were not prefetched."""
        found = self._prefetched_pass(active)
        if found is not None:
            return found
        assert self._target_cache is not None
        levels, rows = [self._level(draft) for draft in active], self._columns.rows
        scored = self._target.vocab_size if rows is None else len(rows)
        prefetch = prefetch_plan(active, scored) if self._runner.prefetches and not self.config.tree else []
        first, *others = self._runner.read(levels, self._target_cache, top=self._top, rows=rows, prefetch=prefetch)
        self._prefetched.keep(others, active)
        return first.output, [0, *itertools.accumulate(len(level.tokens) for level in levels[:-1])]

    def _finish(self, draft: _Builder) -> Draft:
        if self.config.tree:
            draft.rerank()
        return draft.finish(Sampled)

    # ------------------------------------------------------------------ the input of a forward

    def _slot(self, context: Context) -> int:
        if context.request_id not in self._states:
            self._states[context.request_id] = self.ring.acquire()
        return self._states[context.request_id]

    def _fill(self, draft: _Builder) -> None:
        """Write the request's tokens before its root into the ring."""
        tokens, root = draft.context.tokens, len(draft.context.tokens) - 1
        begin = self.ring.missing(draft.slot, tokens, root)
        if begin < root:
            fresh = tokens[begin:root]
            self.ring.write(draft.slot, begin, fresh, *self._runner.keys(fresh, begin))

    def _level(self, draft: _Builder) -> Level:
        """Describe the frontier's rows; they attend to the target's keys before the root only."""
        context, tail, root = draft.context, len(draft.rows), len(draft.context.tokens) - 1
        if draft.frontier == [ROOT]:
            draft.rows[ROOT] = 0
            return Level(draft.slot, context.slot, root, 0, [context.tokens[-1]])
        tokens, depth = [draft.tokens[node] for node in draft.frontier], draft.depths[draft.frontier[0]]
        above = None
        if self.config.tree:
            above = [[draft.rows[each] for each in (*draft.ancestors(node), ROOT)] for node in draft.frontier]
        for node in draft.frontier:
            draft.rows[node] = len(draft.rows)
        return Level(draft.slot, context.slot, root, depth, tokens, tail, above)
