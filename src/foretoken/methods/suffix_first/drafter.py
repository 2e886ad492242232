"""Suffix decoding where the text repeats itself, another drafter where it does not.

copied chain ─► promises enough tokens? ─┬─ yes ──► it goes to the target, and nothing else is run
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
from foretoken.drafting.outer import Outer, OuterOptions, standing
from foretoken.options.option import Option

_NOTHING = Budget(0, 0)
_SUFFIX = "suffix"


class SuffixFirstDrafter(Outer):
    """Proposes what followed the end of the text before, if that is promising, and what another drafter says if not.

    Paper:   Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975: its hybrid with a model's drafts, where a suffix tree
             is taken if its score, the tokens of it that are expected to stand, is above a threshold.
    Exact:   a copy is a point mass; the other drafter's drafts have the distribution that it says, and which of the two
             speaks follows from the past alone. Lossless under any lossless verifier that knows both kinds. With
             ``coupled`` both are coupled to the noise of ``match``.
    Differs: chains instead of trees, which are as fast on a CPU and fit every rule. The score sums the calibrated
             estimates of ``suffix`` (drafters/suffix.py), not raw frequencies. Where the other drafter has nothing to
             say, the copy is taken whatever it promises. The threshold's default is not what the other drafter has
             accepted in the mean: a copy costs no drafting.
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
        """Options of copying first."""

        threshold: Annotated[
            float,
            Option(
                "A copy is taken if so many of its tokens are expected to be accepted; 0 takes every one.",
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
        # requests whose draft of this step is a copy, and the target's states of it, if the inner drafter reads any
        self._copied: dict[int, Features | None] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Look up all requests; ask the inner drafter for those where that promises too little."""
        copies = self._suffix.propose(contexts, budgets)
        taken = [len(copy) > 0 and promise(copy) >= self.config.threshold for copy in copies]
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
        """Pass the target's states on: those of a copy when it is known which of them stand, as if read plainly."""
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
        """Tell the inner drafter of its own drafts, and what it is to know of the others."""
        theirs, stood = [], []
        for outcome in outcomes:
            if outcome.request_id not in self._copied:
                theirs.append(outcome)
            elif (features := self._copied.pop(outcome.request_id)) is not None:
                stood.append(standing(features, outcome.verdict.path))
        if stood:
            self._inner.on_forward(stood)
        if theirs:
            self._inner.observe(theirs)

    def release(self, request_id: int) -> None:
        self._copied.pop(request_id, None)
        self._suffix.release(request_id)
        self._inner.release(request_id)


def promise(copy: Draft) -> float:
    """Tokens of a chain that are expected to stand, by its own confidences."""
    reach = expected = 1.0
    for confidence in copy.confidence:
        reach *= confidence
        expected += reach
    return expected - 1.0
