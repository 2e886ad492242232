"""Suffix decoding where the text repeats itself, another drafter elsewhere: by a threshold."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from foretoken import catalog
from foretoken.core.draft import Coupled, Draft, Law, PointMass, Sampled
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Budget, Verifier
from foretoken.drafters.copies_first import COPIES, CopiesFirst
from foretoken.drafting.outer import OuterOptions, inner_of
from foretoken.options.option import Option


class SuffixFirstDrafter(CopiesFirst):
    """Proposes an earlier continuation of the text's end if it is promising, else the draft of another drafter.

    Paper:   Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975: its hybrid with a model's drafts, which uses a suffix
             tree if its score, the expected number of accepted tokens, is above a threshold.
    Exact:   a copy is a point mass; the other drafter's drafts carry their own distribution, and the choice depends on
             the history alone. Lossless under any lossless verifier of both draft kinds. With ``coupled`` both are
             coupled to the noise of ``match``.
    Differs: chains instead of trees, which are as fast on a CPU and fit every rule. The score sums the calibrated
             estimates of ``suffix`` (drafters/suffix.py), not raw frequencies. If the other drafter has no draft, the
             copy is used with any score. The default threshold is lower than the other drafter's mean acceptance,
             because a copy costs no drafting. An adaptive draft goes on with copies after the other drafter's tokens.
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
            self.check_drafter("suffix_first", "auto", "rasd", COPIES, "none", "entropy_adaptive")

    @classmethod
    def settle(cls, config: Config, verifier: Verifier | None) -> Config:
        coupled = verifier is not None and Coupled in verifier.laws
        return replace(config, coupled=coupled) if config.coupled is None else config

    def __init__(self, config: Config, target: Any) -> None:
        kinds = (Coupled, PointMass) if config.coupled else (Sampled, PointMass)
        super().__init__(inner_of(config, catalog.find(config.inner, "drafter").load(), kinds, target))
        self.config = config

    def _goes_first(self, copy: Draft, budget: Budget, second: Budget) -> bool:
        return copy.promise >= self.config.threshold
