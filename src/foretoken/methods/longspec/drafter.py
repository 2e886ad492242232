"""LongSpec: one block over a short window of its own and the target's last keys drafts a chain or a tree.

    ring      keys and values of the last 512 tokens and the root          follow from the tokens alone
    level 1   the root reads the ring, and the target's P committed keys            gap 1
    level j   nodes at position P + j - 1 read ring, ancestors, blocks of these keys  gap j
    step      the target commits what stands; the ring gets these tokens when it is next asked

Nothing of a draft is kept, and nothing of a prompt is read but its last 513 tokens.

Letters: G key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Offers, Variant
from foretoken.core.protocols import Budget, Cache, Context, Drafter, Outcome
from foretoken.core.tree import ROOT
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.learned_part import find
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.drafting.ring import Ring
from foretoken.methods.longspec.far import KeysValues
from foretoken.methods.longspec.network import LongSpec
from foretoken.methods.longspec.runner import Level, Runner
from foretoken.models.language_model import LanguageModel


@dataclass(slots=True)
class _Builder(RerankedBuilder):
    """A draft while it grows.

    Attributes:
        slot: of the ring.
        rows: of each node that was read, its place behind the ring's tokens.
        far: what the nodes read of the target; None before the root was.
    """

    slot: int = field(kw_only=True)
    rows: dict[int, int] = field(default_factory=dict)
    far: KeysValues | None = None


class LongSpecDrafter(Drafter):
    """Drafts with one block that reads the keys and values of the target's last layer of full attention.

    Paper:   arXiv:2502.17421: the network (section 3.1), the beam of widths 4, 16, 16, 16, 16 (section 3.3).
    Exact:   chains carry the q they were drawn from (a point mass at temperature 0), trees are point masses, which the
             released code's sampling takes for draws. Lossless under any lossless verifier that knows the kind.
    Differs: chains, and they are the default; batches; of a beam, as many nodes as the budget has, the most probable
             paths first; the window is that of positions, for all nodes of a level; no token is read twice: the ring
             holds what a token's id and position give, and the root's row alone is run again; deeper levels read some
             blocks of the target's keys (far.py).
    """

    name = "longspec"
    laws: tuple[type[Law], ...] = (Sampled,)
    offers = Offers(evidence=(GreedyLaws,))
    declared = Declared(
        learned_part="foretoken.methods.longspec.network:LongSpec",
        variants=(
            Variant(untrained={"window": 6}),
            Variant(
                options={"tree": True, "width": 8, "max_depth": 4},
                untrained={"window": 512},
                laws=(PointMass,),
                branches=True,
            ),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of LongSpec.

        Attributes:
            head: a folder written by `foretoken train longspec`; None: ``longspec`` beside the target's weights.
            tree: propose a beam of the most probable continuations instead of a chain.
            max_depth: longest path of a draft; None: as many levels as the head was trained for.
            width: of a tree: nodes of a level; the first one has a quarter of them.
            draft_vocab: a folder of `foretoken calibrate vocabulary`: only its tokens are scored and drafted
                (docs/methods/vocabtrim.md); None: all.
        """

        head: str | None = None
        tree: bool = False
        max_depth: int | None = None
        width: int = 16
        draft_vocab: str | None = None

        def __post_init__(self) -> None:
            if self.head is not None and not isinstance(self.head, str | Path):
                raise ConfigError(f"head={self.head!r} must be a folder")
            if not isinstance(self.tree, bool):
                raise ConfigError(f"tree={self.tree!r} must be true or false")
            for name in ("max_depth", "width"):
                value = getattr(self, name)
                if name == "max_depth" and value is None:
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
                    raise ConfigError(f"{name}={value!r} must be an integer between 1 and 64")
            draft_vocabulary.check_option(self.draft_vocab)

    def __init__(self, config: Config, target: LanguageModel) -> None:
        head = find(LongSpec, config.head, target)
        self.config = config
        self.branches = config.tree
        self.laws = (PointMass,) if config.tree else (Sampled,)
        self._depth, self._window = config.max_depth or head.config.levels, head.config.window
        self._longest = head.config.max_length
        self._target, self._runner, self._layer = target, Runner(target, head), head.config.layer
        heads, width = head.config.kv_heads, head.config.head_dim
        spare = (self._depth - 1) * (config.width if config.tree else 1)
        # the root and the ``window`` tokens before it, and all nodes that are read
        self.ring = Ring(1 + self._window, spare, heads, width, target.dtype, target.device)
        self._columns = DraftColumns(target, draft_vocabulary.find(config.draft_vocab, target), target.vocab_size)
        self._top = min(config.width, len(self._columns)) if config.tree else 1
        self._states: dict[int, int] = {}  # request -> slot of the ring
        self._target_cache: Cache | None = None

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target.

        Raises:
            ConfigError: it does not keep the keys of committed tokens, or not as they were computed.
        """
        if not cache.keeps_keys:
            kept = "codes of them" if self._target.kv_cache_dtype == "int8" else "a state instead"
            raise ConfigError(
                f"method '{self.name}' reads the target's keys and values, but the cache of '{self._target.name}' "
                f"keeps {kept}: choose another method"
            )
        self._target_cache = cache

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow one draft per request; every level is one forward of the block."""
        growing = []
        for context, budget in zip(contexts, budgets, strict=True):
            # behind the positions that the head was trained for nothing is drafted
            depth = min(budget.max_depth, self._depth, self._longest - len(context.tokens))
            if budget.max_nodes > 0 and depth > 0:
                growing.append(_Builder(context, replace(budget, max_depth=depth), slot=self._slot(context)))
        with torch.inference_mode():
            active = [draft for draft in growing if draft.pays(1.0, 1.0)]
            self._columns.begin([draft.context for draft in active])
            for draft in active:
                self._fill(draft)
            while active:
                self._grow(active)
                active = [draft for draft in active if draft.frontier]
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

    def _grow(self, active: Sequence[_Builder]) -> None:
        """One level: read the frontiers, and give their nodes children."""
        levels = [self._level(draft) for draft in active]
        output = self._runner.read(levels, top=self._top, rows=self._columns.rows)
        start = 0
        for draft, level in zip(active, levels, strict=True):
            draft.far = draft.far or level.chosen
            stop, own = start + len(level.tokens), draft.budget.own_past
            seen, first = self._columns.view(output, start, stop, draft.context, top=self._top, own=own)
            if self.config.tree:
                width = -(-self.config.width // 4) if draft.frontier == [ROOT] else self.config.width
                draft.record_beam(seen, first, width=width, name=self.name)
            else:
                node = draft.draw_if_it_pays(seen, first, self.name)
                draft.frontier = [node] if node is not None and draft.has_room(node) else []
            start = stop

    def _finish(self, draft: _Builder) -> Draft:
        if self.config.tree:
            draft.rerank_what_pays()
        return draft.finish(Sampled)

    # ------------------------------------------------------------------ what is read

    def _slot(self, context: Context) -> int:
        if context.request_id not in self._states:
            self._states[context.request_id] = self.ring.acquire()
        return self._states[context.request_id]

    def _fill(self, draft: _Builder) -> None:
        """Bring the ring to the request's last token."""
        tokens = draft.context.tokens
        begin = self.ring.missing(draft.slot, tokens)
        if begin < len(tokens):
            self.ring.write(draft.slot, begin, tokens[begin:], *self._runner.keys(tokens[begin:], begin))

    def _level(self, draft: _Builder) -> Level:
        """What the frontier reads: of the target the keys before the root, never those behind them."""
        assert self._target_cache is not None
        context, slot, ring, most = draft.context, draft.slot, self.ring, 1 + self._window
        root = len(context.tokens) - 1
        if draft.far is None:
            keys_GPd, values_GPd = self._target_cache.committed(self._layer, context.slot)
            far = keys_GPd[:, :root], values_GPd[:, :root]
            # its own keys are the ring's last
            return Level([context.tokens[-1]], True, root, lambda k_G1d, v_G1d: ring.read(slot, most), None, far)
        tokens = [draft.tokens[node] for node in draft.frontier]
        depth, read = draft.depths[draft.frontier[0]], len(draft.rows)
        near = max(0, most - depth)

        def beside(k_GRd: Tensor, v_GRd: Tensor) -> KeysValues:
            ring.draft(slot, read, k_GRd, v_GRd)
            return ring.read(slot, near, read + len(tokens))

        for node in draft.frontier:
            draft.rows[node] = len(draft.rows)
        seen = self._seen(draft, min(near, len(context.tokens)))
        return Level(tokens, False, root + depth, beside, seen, draft.far)

    def _seen(self, draft: _Builder, near: int) -> Tensor | None:
        """bool [R, tokens of the window and nodes]: of the nodes, every one sees its ancestors and itself."""
        depth = draft.depths[draft.frontier[0]]
        if draft.chain and depth <= self._window:
            return None
        seen = torch.zeros(len(draft.frontier), near + len(draft.rows), dtype=torch.bool)
        seen[:, :near] = True
        for row, node in enumerate(draft.frontier):
            above = [node, *draft.ancestors(node)[: self._window]]
            seen[row, [near + draft.rows[each] for each in above]] = True
        return seen.to(self._target.device)
