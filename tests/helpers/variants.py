"""The variants of drafters as recipes for the exactness tests.

A drafter's variants are those that it declares (``declared.variants``). One with a learned part has a row in
``WITH_PARTS``, which says what the untrained part is like that it drafts with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from foretoken import catalog
from foretoken.core.draft import Law, PointMass, Sampled
from foretoken.core.needs import Variant
from foretoken.core.protocols import Verifier
from foretoken.drafting.level_tree import DRAWN
from foretoken.models.language_model import LanguageModel
from helpers.adapters import shelf
from helpers.stores import stored
from helpers.untrained import untrained as untrained_part

DRAFT = "zoo:draft"  # for whoever wants a second checkpoint


@dataclass(frozen=True, kw_only=True)
class WithPart(Variant):
    """A variant, and options of ``untrained.random_part``; None: it needs no learned part, or finds the bundled one."""

    untrained: Mapping[str, Any] | None = None


_FEW = {"draft_vocab_size": 512}
_TREES: dict[str, Any] = {"laws": (PointMass,), "branches": True}
_FIXED = {"width": 4, "max_depth": 4, "budget": "fixed"}

WITH_PARTS: dict[str, tuple[WithPart, ...]] = {
    "diffuspec": (
        WithPart(options={"tree": False}, untrained=_FEW, branches=False),
        WithPart(untrained=_FEW, one_rule=True),
        WithPart(options={"tree": True}, untrained={**_FEW, "slots": 4}, **_TREES),
        WithPart(
            options={"tree": False, "draw": False}, untrained=_FEW, laws=(PointMass,), branches=False, one_rule=True
        ),
        WithPart(options={"model": "zoo:diffusion", "slots": 4, "tree": True}, one_rule=True, **_TREES),
    ),
    "dovetail": (
        WithPart(options=_FIXED, untrained={**_FEW, "layers": 2}, **_TREES),
        WithPart(options={**_FIXED, "place": "thread"}, untrained={**_FEW, "layers": 2}, one_rule=True, **_TREES),
        WithPart(
            options={"tree": False, "max_depth": 3, "budget": "fixed"},
            untrained={**_FEW, "layers": 2, "fusion": "concat"},
            laws=(Sampled,),
            branches=False,
            one_rule=True,
        ),
    ),
    "longspec": (
        WithPart(untrained={"window": 6}),
        WithPart(options={"tree": True, "width": 8, "max_depth": 4}, untrained={"window": 512}, **_TREES),
    ),
    "kangaroo": (
        WithPart(options={"threshold": 0.2}, untrained={"exit_layer": 1}),
        WithPart(options={"threshold": 0.1, "tree": True, "width": 4}, untrained={"exit_layer": 2}, **_TREES),
        WithPart(options={"threshold": 0}, untrained={"exit_layer": 3}, one_rule=True),
    ),
    "scylla": (
        WithPart(options={"width": 4, "max_depth": 4}, untrained={**_FEW, "layers": 2}, **_TREES),
        WithPart(
            options={"tree": False, "max_depth": 3},
            untrained={**_FEW, "layers": 2},
            laws=(Sampled,),
            branches=False,
            one_rule=True,
        ),
    ),
    "eagle": (
        WithPart(untrained=_FEW),
        WithPart(options={"tree": True, "width": 4, "max_depth": 4}, untrained=_FEW, **_TREES),
        *(
            WithPart(
                options={"tree": True, "width": 3, "max_depth": 4, "draw": draw},
                untrained=_FEW,
                laws=(law,),
                branches=True,
                one_rule=True,
            )
            for draw, law in DRAWN.items()
        ),
        WithPart(options={"max_depth": 3}, untrained={"algorithm": "eagle"}, one_rule=True),
    ),
    "sprinter": (
        WithPart(untrained={"feature": "pre"}),
        WithPart(untrained={"feature": "drawn"}, one_rule=True),
        WithPart(untrained={"feature": "post"}, one_rule=True),
        WithPart(options={"stop": "confidence"}, one_rule=True),
    ),
    "gemma4_assistant": (
        WithPart(options={"probe": False}, untrained={}),
        WithPart(options={"probe": False, "max_depth": 3}, untrained={"centroids": 4}, one_rule=True),
    ),
    "dflash": (
        WithPart(untrained=_FEW),
        WithPart(untrained={"markov_rank": 8, "markov_kind": "rnn", "anchor_predicts": True}),
        WithPart(untrained={"conv_taps": 2, "selector_rank": 8, "selector_top": 512}),
    ),
}


@dataclass(frozen=True)
class Case:
    """One variant of one drafter."""

    entry: catalog.Entry
    variant: WithPart

    @property
    def label(self) -> str:
        """The method, and what distinguishes this variant of it."""
        given = {**self.variant.options, **(self.variant.untrained or {})}
        return "-".join([self.entry.name, *map(str, given.values())])

    @property
    def laws(self) -> tuple[type[Law], ...]:
        """Kinds of q that it proposes with."""
        found: tuple[type[Law], ...] = self.entry.load().laws
        return found if self.variant.laws is None else self.variant.laws

    @property
    def branches(self) -> bool:
        """Whether it may propose trees."""
        return bool(self.entry.load().branches if self.variant.branches is None else self.variant.branches)

    @property
    def kind(self) -> tuple[tuple[type[Law], ...], bool]:
        """What a rule sees of its drafts: the kinds of q, and whether there are trees."""
        return self.laws, self.branches

    def fits(self, rule: str) -> bool:
        """Whether a rule takes trees where there are any, and every kind of distribution. No model is loaded to find
        out.
        """
        verifier = catalog.find(rule, "verifier").load()
        return (verifier.trees or not self.branches) and set(self.laws) <= set(verifier.laws)

    def options(self, target: LanguageModel) -> dict[str, Any]:
        """The drafter's own options over a target; a needed learned part is made once for the test run."""
        declared = self.entry.load().declared
        options: dict[str, Any] = {"model": DRAFT} if declared.draft_model else {}
        if declared.datastore:
            options["datastore"] = stored(target.name)
        if self.variant.untrained is not None:
            assert declared.learned_part is not None, f"{self.entry.name}: no learned part, but one untrained is wanted"
            option = catalog.imported(declared.learned_part).option
            options[option] = untrained(declared.learned_part, target, **self.variant.untrained)
        return {**options, **self.variant.options}

    def config(self, target: LanguageModel, rule: str | Verifier | None, count: int | str) -> dict[str, Any]:
        """The whole ``speculative_config``; without a rule the strongest lossless one decides, not the method's own."""
        return {
            "method": self.entry.name,
            **self.options(target),
            "verifier": "auto" if rule is None else rule,
            # what drafts nothing refuses a length
            **({} if self.entry.name == "none" else {"num_speculative_tokens": count}),
        }


def cases(*, brought: bool = False) -> list[Case]:
    """Every declared variant of every drafter that the catalogue has.

    Args:
        brought: of those that draft with a part that the target brings, and need one that does; else of the others.
    """
    return [
        Case(entry, variant)
        for entry in catalog.entries("drafter")
        for variant in WITH_PARTS.get(entry.name) or map(_without, entry.load().declared.variants)
        if brought == entry.load().declared.brought
    ]


def _without(variant: Variant) -> WithPart:
    return WithPart(**{each.name: getattr(variant, each.name) for each in fields(variant)})


def lossless_rules() -> list[str]:
    """Names of all rules that keep the target's distribution, of the catalogue."""
    return [entry.name for entry in catalog.entries("verifier") if entry.promise != "approximate"]


def untrained(place: str, target: LanguageModel, **options: Any) -> str:
    """The value of the option for an untrained learned part; made once for a target and options."""
    return _untrained(place, target, tuple(sorted(options.items())))


@cache
def _untrained(place: str, target: LanguageModel, options: tuple[tuple[str, Any], ...]) -> str:
    folder = Path(tempfile.mkdtemp(dir=shelf()))
    given: Mapping[str, Any] = dict(options)
    return untrained_part(catalog.imported(place), target, folder, **given)
