"""What every request drafts with where no method is named: copies, the one model at hand, both, or nothing."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from foretoken import catalog, zoo
from foretoken.core.draft import Coupled, Draft, Law, PointMass, Sampled
from foretoken.core.errors import ForetokenError, ModelError, NoMemory
from foretoken.core.needs import Declared, Offers, Variant
from foretoken.core.protocols import Budget, Context, Verifier
from foretoken.drafters.copies_first import NOTHING, CopiesFirst
from foretoken.drafting import learned_part
from foretoken.drafting.outer import OuterOptions, inner_of
from foretoken.drafting.published.folder import method_for
from foretoken.options.option import Option

log = logging.getLogger(__name__)

_NONE = "none"
_PROMISING = 1.0  # expected tokens of a copy that goes first where no rates are measured


class AutoDrafter(CopiesFirst):
    """Proposes for each request and step by the source with the highest expected rate; nothing, if none beats plain.

    Paper:   ours; the copies are those of SuffixDecoding, arXiv:2411.04975. That drafters can be compared by what
             they would have brought, and not by trying each: HedgeSpec, arXiv:2510.20064.
    Exact:   a copy is a point mass, the model's drafts carry their own distribution, and copies after them follow from
             their tokens. The choice follows from the past, measured times and q, never from a drawn token. Where no
             verifier is named, a request with a seed gets copies only, so that its tokens are those of plain decoding.
    Differs: one model at most, which the user names or which lies at hand; it is never chosen among several.
    """

    name = "auto"
    declared = Declared(
        draft_model=True,
        finds_model=True,
        variants=(Variant(), Variant(options={"drafter": "ngram"}, laws=(PointMass,), one_rule=True)),
    )
    laws: tuple[type[Law], ...] = (PointMass, Sampled)

    @dataclass(frozen=True, kw_only=True)
    class Config(OuterOptions):
        """Options of choosing by itself."""

        drafter: Annotated[
            str, Option("The method next to copying; auto: that of `model` or `head`, else of one at hand.")
        ] = "auto"

        def check_together(self) -> None:
            self.check_drafter("suffix_first", "rasd", "suffix", "entropy_adaptive")

    @classmethod
    def settle(cls, config: Config, verifier: Verifier | None) -> Config:
        coupled = verifier is not None and Coupled in verifier.laws
        return replace(config, coupled=coupled) if config.coupled is None else config

    def __init__(self, config: Config, target: Any) -> None:
        self.config = config
        kinds = (Coupled, PointMass) if config.coupled else (Sampled, PointMass)
        off, why = "no_drafter", "none is found, and none is named"
        for options, named in _at_hand(config, target):
            try:
                inner = inner_of(options, catalog.find(options.drafter, "drafter").load(), kinds, target)
                super().__init__(inner)
                off, why = ("no_drafter", "drafter=none") if inner.name == _NONE else ("", "")
                break
            except Exception as error:
                if named:
                    raise
                off, why = _code_of(error), f"{options.drafter}: {error}"
        else:
            nothing = catalog.find(_NONE, "drafter").load()
            super().__init__(inner_of(replace(config, drafter=_NONE), nothing, kinds, target))
        self.offers = Offers(portfolio=off, keeps_seeds=True, foretells=True)
        said = f"no model drafts ({off}: {why})" if off else f"'{self._name}' drafts where it is faster"
        self._said = f"copies from the text; {said}"
        log.info("auto: %s", self._said)

    @property
    def explanation(self) -> str:  # type: ignore[override]
        """What drafts, what does not, and why."""
        inner = self._inner.explanation
        return f"{self._said} ({inner})" if inner else self._said

    def _second(self, context: Context, budget: Budget) -> Budget:
        if context.params.repeatable and Sampled in self.laws and not budget.history_only:
            return NOTHING  # else the seed would give other tokens than plain decoding
        return super()._second(context, budget)

    def _goes_first(self, copy: Draft, budget: Budget, second: Budget) -> bool:
        if budget.stop_rule is None or not second.rate:
            return copy.promise >= _PROMISING or not second.max_nodes
        return budget.stop_rule.rate(len(copy)) >= second.rate


def _at_hand(config: AutoDrafter.Config, target: Any) -> Iterator[tuple[AutoDrafter.Config, bool]]:
    """Drafters that could draft for a target, the best first, and whether the user has named them.

    For the bundled pair that is its draft: measured, it is faster than the heads near the weights.
    """
    given, named = config.model or config.head, config.drafter != AutoDrafter.name
    if named or given is not None:
        yield (config if named else replace(config, drafter=method_for(given))), True
        return
    if zoo.drafts_for(zoo.DRAFT, target.name):
        yield replace(config, drafter="draft_model", model=zoo.DRAFT), False
    layers = getattr(target.config, "num_nextn_predict_layers", None)
    last = []
    for entry in catalog.entries("drafter"):
        if entry.own_rule is not None or entry.name == AutoDrafter.name:
            continue
        declared = entry.load().declared
        if declared.brought and layers:
            last.append(entry.name)
        part = None if declared.brought or declared.draft_model else declared.learned_part
        if part is not None and learned_part.lies_beside(catalog.imported(part), target.source):
            yield replace(config, drafter=entry.name), False
    for name in last:
        yield replace(config, drafter=name), False


def _code_of(error: Exception) -> str:
    """Why a drafter is left out, in a word."""
    if isinstance(error, MemoryError | NoMemory):
        return "memory"
    damaged = type(error) is ModelError or not isinstance(error, ForetokenError)
    return "load_failed" if damaged else "unsupported"
