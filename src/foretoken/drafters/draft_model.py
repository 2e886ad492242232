"""Drafting with a second, smaller checkpoint: a chain or a tree, batched over requests.

How the checkpoint is run is in drafting/draft_runner.py; here is which children a node gets, and by which distribution.

Letters: M rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import torch
from torch import Tensor

from foretoken.core.draft import Coupled, Draft, HubPair, Law, PointMass, Sampled, Tabulated
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Context, Verifier
from foretoken.core.randomness import gumbel
from foretoken.core.tree import ROOT
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.draft_builder import DraftBuilder, check_numbers
from foretoken.drafting.draft_runner import DRAFT_CHECKPOINT, DRAFT_DTYPE, DraftRunner, Rows, RunnerBuilder
from foretoken.drafting.level_tree import DRAWN, extend_chain, extend_drawn
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Checked, Option

_LAW_OF: dict[str, type[Law]] = {
    "chain": Sampled,
    "coupled": Coupled,
    "topk": PointMass,
    "reranked": PointMass,
    **DRAWN,
    "hub": HubPair,
}
_CHAINS = ("chain", "coupled")
_RANKED = ("topk", "reranked")
# where a rule takes several kinds: those with the higher optimum first
_PREFERRED = (*DRAWN, "hub", "topk")
_NUM_DRAFTS = 3  # children per node of a tree, by default


class ModelDrafter(DraftRunner):
    """Runs the draft model forward and proposes its tokens.

    Paper:   Leviathan et al. 2023, arXiv:2211.17192 (chains); `topk` grows a tree by cumulative probability as
             EAGLE-2, arXiv:2406.16858 §4.1, does with its own head, `reranked` one that is recorded wide and cut to its
             best nodes (§4.2); sampled trees as SpecInfer, arXiv:2305.09781.
    Exact:   chains and sampled trees carry the q they were drawn from; at temperature 0, for `topk` and `reranked` the
             proposals are deterministic (point mass). Lossless under any lossless verifier that knows the kind.
             `coupled` draws with the noise that `match` uses (the Gumbel coupling of arXiv:2408.07978), with several
             children per node those that the noise puts first.
    Differs: the chain's length may be decided while drafting (adaptive). For drawn tokens that decision never looks
             at the token it would drop, else the distribution of the proposal would no longer be q.
    """

    name = "draft_model"
    declared = Declared(
        draft_model=True,
        variants=(
            *(Variant(options={"tree": each}, laws=(_LAW_OF[each],), branches=each not in _CHAINS) for each in _LAW_OF),
            Variant(options={"tree": "coupled", "num_drafts": 3}, laws=(Coupled,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of drafting with a model."""

        model: Annotated[str, DRAFT_CHECKPOINT]
        tree: Annotated[
            str | None,
            Option(
                "Shape and distribution of the draft; None: a chain, or a tree for the verifier or num_drafts.",
                choices=tuple(_LAW_OF),
                more="`chain`; `coupled`: a chain, or a tree of num_drafts children, with the noise of `match`, which "
                "keeps a seed's tokens; `topk`: a tree of the most probable continuations; `reranked`: the best nodes "
                "of a larger one. Children are drawn (at temperature 0 a chain) in `sampled`, "
                "`sampled_without_replacement`, `top_then_sampled` (greedy draft sampling) and `hub` (SpecHub's "
                "pairs).",
            ),
        ] = None
        num_drafts: Annotated[
            int | None,
            Option(
                "Of a tree: children per expanded node, and nodes expanded per level; None: 3, of a hub tree 2.",
                least=1,
                most=64,
            ),
        ] = None
        vocabulary: Annotated[
            str | None,
            Option(
                "Drafts of a model with another tokenizer; None: `text` at temperature 0, else `shared`.",
                choices=("same", "shared", "text"),
                more="`same`: refuse such a model; `shared`: its distribution, normalised over the tokens that both "
                "have; `text`: its most probable tokens, spelled in the target's (chains only).",
            ),
        ] = None
        draft_vocab: Annotated[str | Path | None, draft_vocabulary.OPTION] = None
        dtype: Annotated[str | None, DRAFT_DTYPE] = None

        def check_together(self) -> None:
            count = self.num_drafts
            if self.tree == "chain" and count is not None and count > 1:
                raise ConfigError(
                    f"num_drafts={count} with tree='{self.tree}': a chain has one token per position; leave one out"
                )
            if self.tree == "hub" and count not in (None, 2):
                raise ConfigError(f"num_drafts={count} with tree='hub': SpecHub draws pairs; use 2 or leave it out")

        def suited_to(self, verifier: Verifier | None) -> "ModelDrafter.Config":
            """Choose the options that the user left open so that the verifier knows the distribution.

            Raises:
                ConfigError: several drafts per position for a rule of chains.
            """
            tree = self.tree or self._tree_for(verifier)
            count = self.num_drafts or (1 if tree in _CHAINS else 2 if tree == "hub" else _NUM_DRAFTS)
            return replace(self, tree=tree, num_drafts=count)

        def _tree_for(self, verifier: Verifier | None) -> str:
            several = (self.num_drafts or 1) > 1
            if verifier is None:
                return "top_then_sampled" if several else "chain"
            if not verifier.trees:
                if several:
                    raise ConfigError(
                        f"num_drafts={self.num_drafts} with verifier='{verifier.name}', which verifies chains: "
                        "leave num_drafts out, or use a rule of trees (foretoken methods lists them)"
                    )
                return "chain"
            if PointMass in verifier.laws and not several:
                return "chain"
            if Coupled in verifier.laws:
                return "topk"  # a rule that ignores the distribution accepts most where the draft is most probable
            if self.num_drafts == 1 and Sampled in verifier.laws:
                return "chain"
            return next((tree for tree in _PREFERRED if _LAW_OF[tree] in verifier.laws), "chain")

    @classmethod
    def settle(cls, config: Config, verifier: Verifier | None) -> Config:
        return config.suited_to(verifier)

    def __init__(self, config: Config, target: LanguageModel) -> None:
        self.config = config
        settled = config.suited_to(None)
        self._tree = cast(str, settled.tree)
        self._count = cast(int, settled.num_drafts)
        if self._count > target.vocab_size:
            raise ConfigError(f"num_drafts={self._count} is above the vocabulary of {target.vocab_size}: use fewer")
        super().__init__(
            config.model,
            target,
            top=self._count if self._tree in _RANKED else 1,
            draft_vocab=config.draft_vocab,
            dtype=config.dtype,
            any_vocabulary=config.vocabulary != "same",
        )
        self.branches = self._tree not in _CHAINS or self._count > 1
        # context rows of a draft vocabulary are chosen by tokens that it was shown, also where these did not stand
        self.offers = replace(self.offers, ahead=config.draft_vocab is None and self.other is None)
        self.laws: tuple[type[Law], ...] = (_LAW_OF[self._tree],)
        if self.other is not None:
            if config.vocabulary == "text":
                if self.branches:
                    raise ConfigError(f"vocabulary='text' with tree='{self._tree}': a text is a chain; leave one out")
                self.laws = (PointMass,)
            self.explanation = (
                f"'{self.model.name}' has another vocabulary than '{target.name}'; {self.other.share:.0%} of its "
                "tokens are shared"
            )

    def _expand(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[RunnerBuilder]:
        """Give the frontier of each draft its children; returns the drafts that go on."""
        going_on = []
        for draft, its in zip(drafts, rows, strict=True):
            if self._tree == "topk":
                self._expand_topk(draft, its)
            elif self._tree == "reranked":
                self._expand_reranked(draft, its)
            elif draft.spells:
                self._expand_spelled(draft, its)
            elif draft.context.params.greedy:
                extend_chain(draft, its.output, its.start, self.config.model)
            elif self._tree == "coupled":
                self._expand_coupled(draft, its)
            else:
                self._expand_sampled(draft, its)
            if draft.frontier:
                going_on.append(draft)
        return going_on

    def _spells(self, context: Context) -> bool:
        if self.other is None or self.branches or self.config.vocabulary == "shared":
            return False
        return self.config.vocabulary == "text" or context.params.greedy

    def _expand_spelled(self, draft: RunnerBuilder, rows: Rows) -> None:
        """One child, the draft's own best token, whatever the request allows the target to emit."""
        output, parent = rows.output, draft.frontier[0]
        token, confidence = output.best[rows.start], output.top_shares[rows.start]
        if confidence != confidence:
            check_numbers(rows.logits_MV, self.config.model)
        pays = confidence == confidence and draft.pays(draft.reach_of(parent), confidence)
        node = draft.add(token, parent, confidence, 0) if pays else None
        draft.frontier = [node] if node is not None and draft.has_room(node) else []

    def _law(self, draft: RunnerBuilder, rows: Rows) -> Tensor:
        """Processed logits of the frontier."""
        return draft.process(rows.logits_MV, rows.output.columns)

    def _expand_coupled(self, draft: RunnerBuilder, rows: Rows) -> None:
        """The children that the noise of their position puts first. `match` does not mind which tokens are proposed."""
        columns, fresh = rows.output.columns, []
        ids = None if columns is None else columns.ids_C
        for parent, logits_V in zip(draft.frontier, self._law(draft, rows), strict=True):
            position = len(draft.context.tokens) + (0 if parent == ROOT else draft.depths[parent])
            noise_V = gumbel(draft.context.streams.seed, (position,), self.vocab_size, logits_V.device, ids)[0]
            q_V = torch.softmax(logits_V, dim=-1)
            if bool(q_V[0].isnan()):
                check_numbers(rows.logits_MV, self.config.model)
                continue  # no token of this row may be emitted
            for column in (noise_V + logits_V).topk(self._count).indices.tolist():
                confidence = float(q_V[column])
                if len(draft.tokens) < draft.budget.max_nodes and draft.pays(draft.reach_of(parent), confidence):
                    fresh.append(draft.add(column if ids is None else int(ids[column]), parent, confidence, 0))
        fresh.sort(key=lambda node: -draft.reach[node])
        draft.frontier = [node for node in fresh[: self._count] if draft.has_room(node)]

    def _expand_sampled(self, draft: RunnerBuilder, rows: Rows) -> None:
        """Drawn children, of a chain one."""
        kind = cast(type[Tabulated], _LAW_OF[self._tree])
        extend_drawn(draft, rows.output, rows.start, kind, count=self._count, name=self.config.model)

    def _expand_topk(self, draft: RunnerBuilder, rows: Rows) -> None:
        """The most probable children of the frontier; the best of them by cumulative probability are expanded next."""
        draft.extend_tree(rows.output, rows.start, width=self._count, name=self.config.model, pays=draft.pays)

    def _expand_reranked(self, draft: RunnerBuilder, rows: Rows) -> None:
        """Record a level; read its nodes that can have descendants among the best, while the cache has free rows."""
        draft.record_level(rows.output, rows.start, width=self._count, name=self.config.model)
        context, read = draft.context, len(draft.state.row_of) + len(draft.frontier)
        if len(context.tokens) + read > self.model.max_length:
            draft.frontier = []

    def _finish(self, draft: RunnerBuilder) -> Draft:
        if self._tree == "reranked":
            draft.rerank()
        if draft.spells:
            return self._spelled(draft).finish(PointMass)
        return draft.finish(_LAW_OF[self._tree])

    def _spelled(self, draft: RunnerBuilder) -> DraftBuilder:
        """The draft in the target's tokens."""
        assert self.other is not None
        found, reach = DraftBuilder(draft.context, draft.budget), 1.0
        for token, count in self.other.spelled(draft.context.tokens, draft.tokens)[: draft.budget.max_nodes]:
            now = draft.reach[count - 1]
            found.add(
                token, len(found.tokens) - 1 if found.tokens else ROOT, min(1.0, now / reach) if reach else 0.0, 0
            )
            reach = now
        return found
