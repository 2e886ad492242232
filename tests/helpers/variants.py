"""What drafters declare for the exactness tests (``declared.variants``), as recipes: no method is named here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretoken import catalog
from foretoken.core.draft import Law
from foretoken.core.needs import Variant
from foretoken.core.protocols import Verifier
from foretoken.models.language_model import LanguageModel
from helpers.adapters import shelf
from helpers.stores import stored
from helpers.untrained import untrained as untrained_part

DRAFT = "zoo:draft"  # for whoever wants a second checkpoint


@dataclass(frozen=True)
class Case:
    """One variant of one drafter."""

    entry: catalog.Entry
    variant: Variant

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
        for variant in entry.load().declared.variants
        if brought == (entry.load().declared.brought)
    ]


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
