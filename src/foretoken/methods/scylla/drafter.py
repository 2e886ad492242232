"""Scylla: decoder layers over the target's last state draft a tree; its size depends on the number of requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from foretoken.core.draft import Draft, GreedyLaws, PointMass, Sampled
from foretoken.core.files import home_expanded
from foretoken.core.needs import Declared, Offers, Variant
from foretoken.core.protocols import Budget, Context
from foretoken.drafting.feature_heads.drafter import TREE, FeatureDrafter, HeadOptions
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.learned_part import find, folder_of
from foretoken.methods.scylla import width
from foretoken.methods.scylla.network import Scylla
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Option


class ScyllaDrafter(FeatureDrafter):
    """Drafts with D decoder layers over the output of the target's final norm.

    Paper:   "Scaling Laws for Speculative Decoding", arXiv:2505.07858; the tree is EAGLE-2's, arXiv:2406.16858.
    Exact:   trees are point masses, chains carry the q of their samples. The width depends
             on the number of requests, never on their drafts, so it cannot bias the output.
    Differs: the width comes from a measured table (width.py), while the paper fits a formula; it is 0 for batches where
             no width beats plain decoding. History-only requests always get the width of a single request. Chains,
             too. Without a table, the number of nodes is the same as for other drafters.
    """

    name = "scylla"
    laws = (PointMass,)
    branches = True
    declared = Declared(
        learned_part="foretoken.methods.scylla.network:Scylla",
        variants=(
            Variant(options={"width": 4, "max_depth": 4}, laws=(PointMass,), branches=True),
            Variant(options={"tree": False, "max_depth": 3}, laws=(Sampled,), branches=False),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadOptions):
        """Options of Scylla."""

        widths: Annotated[
            str | Path | None,
            Option("A file of `foretoken calibrate scylla`; None: `widths.json` in the head's folder, if any."),
        ] = None
        tree: Annotated[bool, TREE] = True

    def __init__(self, config: Config, target: LanguageModel) -> None:
        network = find(Scylla, config.head, target)
        super().__init__(
            config, target, Runner(target, network, config.dtype), network.description.taps, draw=config.draw
        )
        folder = home_expanded(config.head) if config.head else folder_of(target.source) / Scylla.algorithm
        place = home_expanded(config.widths) if config.widths else folder / width.FILE
        self.widths: width.Widths | None = None
        if config.widths or place.is_file():
            self.widths = width.Widths.load(place, fingerprint_of(target.source))
            self.offers = Offers(evidence=(GreedyLaws,), length=self.widths.most)
            table = ", ".join(f"{nodes} for {batch}" for batch, nodes in self.widths.table)
            self.explanation = f"nodes by requests: {table}"

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Propose as :class:`FeatureDrafter`; the width of the batch limits every budget."""
        widths = self.widths
        if widths is not None:
            most, alone = widths.at(len(contexts)), widths.at(1)
            budgets = [
                replace(budget, max_nodes=min(budget.max_nodes, alone if budget.history_only else most))
                for budget in budgets
            ]
        return super().propose(contexts, budgets)
