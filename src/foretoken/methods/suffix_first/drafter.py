"""Suffix decoding where the text repeats itself, another drafter elsewhere.

copied chain ─► enough tokens expected? ─┬─ yes ──► the copy goes to the target, without a draft of the other drafter
                                         └─ no ───► the other drafter's draft: a draft model, an EAGLE head, …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from foretoken import catalog
from foretoken.core.draft import Coupled, Draft, Law, PointMass, Sampled
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Budget, Context, Features, Outcome, Verifier
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.drafting.outer import Outer, OuterOptions
from foretoken.options.option import Option

_NOTHING = Budget(0, 0)
_SUFFIX = "suffix"


class SuffixFirstDrafter(Outer):
    """Proposes an earlier continuation of the text's end if it is promising, else the draft of another drafter.

    Paper:   Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975: its hybrid with a model's drafts, which uses a suffix
             tree if its score, the expected number of accepted tokens, is above a threshold.
    Exact:   a copy is a point mass; the other drafter's drafts carry their own distribution, and the choice depends on
             the history alone. Lossless under any lossless verifier of both draft kinds. With ``coupled`` both are
             coupled to the noise of ``match``.
    Differs: chains instead of trees, which are as fast on a CPU and fit every rule. The score sums the calibrated
             estimates of ``suffix`` (drafters/suffix.py), not raw frequencies. If the other drafter has no draft, the
             copy is used with any score. The default threshold is lower than the other drafter's mean acceptance,
             because a copy costs no drafting.
    """

    name = "suffix_first"
    declared = Declared(
        draft_model=True,
        variants=(
            Variant(),
            Variant(options={"coupled": True}, laws=(Coupled,)),
            Variant(options={"drafter": "ngram"}, laws=(PointMass,), one_rule=True),
        ),
    )
    laws: tuple[type[Law], ...] = (PointMass, Sampled)

    @dataclass(frozen=True, kw_only=True)
    class Config(OuterOptions):
        """Options of suffix-first drafting."""

        threshold: Annotated[
            float,
            Option(
                "Use a copy if at least this many of its tokens are expected to be accepted; 0: always.",
                least=0,
                most=1000,
                remedy="give a number of tokens",
            ),
        ] = 1.0

        def check_together(self) -> None:
            self.check_drafter("suffix_first", "rasd", _SUFFIX, "none", "entropy_adaptive")

    @classmethod
    def settle(cls, config: Config, verifier: Verifier | None) -> Config:
        coupled = verifier is not None and Coupled in verifier.laws
        return replace(config, coupled=coupled) if config.coupled is None else config

    def __init__(self, config: Config, target: Any) -> None:
        kinds = (Coupled, PointMass) if config.coupled else (Sampled, PointMass)
        super().__init__(config, catalog.find(config.drafter, "drafter").load(), kinds, target)
        self.config = config
        self._suffix = SuffixDrafter(SuffixDrafter.Config(tree=False))  # chains, which every rule takes
        self.branches = self._inner.branches
        # requests with a copy in this step, and the target's states of it, if the inner drafter reads any
        self._copied: dict[int, Features | None] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Look up all requests; use the inner drafter for those with too low a score."""
        copies = self._suffix.propose(contexts, budgets)
        taken = [len(copy) > 0 and copy.promise >= self.config.threshold for copy in copies]
        left = [_NOTHING if copied else budget for copied, budget in zip(taken, budgets, strict=True)]
        drafts = copies if all(taken) else self._inner.propose(contexts, left)
        found = []
        for context, copied, copy, draft in zip(contexts, taken, copies, drafts, strict=True):
            self._copied.pop(context.request_id, None)
            if copied or (len(copy) and not len(draft)):
                self._copied[context.request_id] = None
                found.append(replace(copy, law=self.law, sources=(_SUFFIX,) * len(copy)))
            else:
                found.append(replace(draft, sources=(self.config.drafter,) * len(draft)))
        return found

    def on_forward(self, features: Sequence[Features]) -> None:
        """Forward the target's states, those of a copy after its verdict, as if they had been read without a draft."""
        theirs = []
        for each in features:
            request_id = each.context.request_id
            if len(each.draft) and request_id in self._copied:
                self._copied[request_id] = each
            else:
                theirs.append(each)
        if theirs:
            self._inner.on_forward(theirs)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Report the outcomes of the inner drafter's own drafts, and the tokens that it needs from the others."""
        theirs, stood = [], []
        for outcome in outcomes:
            if outcome.request_id not in self._copied:
                theirs.append(outcome)
            elif (features := self._copied.pop(outcome.request_id)) is not None:
                stood.append(features.standing(outcome.verdict.path))
        if stood:
            self._inner.on_forward(stood)
        if theirs:
            self._inner.observe(theirs)

    def release(self, request_id: int) -> None:
        self._copied.pop(request_id, None)
        self._suffix.release(request_id)
        self._inner.release(request_id)
