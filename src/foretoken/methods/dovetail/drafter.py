"""Dovetail: decoder blocks behind a gate draft a tree from the target's last state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretoken.core.draft import PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.drafting.feature_heads.drafter import FeatureDrafter, GrowthOptions
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.learned_part import find
from foretoken.methods.dovetail.network import CONCAT, Dovetail
from foretoken.models.language_model import LanguageModel

_UNTRAINED = {"layers": 2, "draft_vocab_size": 512}


class DovetailDrafter(FeatureDrafter):
    """Drafts with m decoder blocks over what the target's final norm gives.

    Paper:   arXiv:2412.18934; the tree is EAGLE-2's, arXiv:2406.16858.
    Exact:   trees are point masses, chains carry the q they were drawn from.
    Differs: chains, too.
    """

    name = "dovetail"
    laws = (PointMass,)
    branches = True
    declared = Declared(
        learned_part="foretoken.methods.dovetail.network:Dovetail",
        variants=(
            Variant(options={"width": 4, "max_depth": 4}, untrained=_UNTRAINED, laws=(PointMass,), branches=True),
            Variant(
                options={"tree": False, "max_depth": 3},
                untrained={**_UNTRAINED, "fusion": CONCAT},
                laws=(Sampled,),
                branches=False,
                one_rule=True,
            ),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(GrowthOptions):
        """Options of Dovetail.

        Attributes:
            head: a folder written by `foretoken train dovetail`; None: ``dovetail`` beside the target's weights.
            tree: propose a tree of the most probable continuations; else a chain.
            max_depth: longest path of a draft.
            width: of a tree: continuations recorded at a node, and nodes expanded at a level.
            draft_vocab: a folder of `foretoken calibrate vocabulary`: only its tokens are scored and drafted
                (docs/methods/vocabtrim.md), by a head that scores with the target's own; None: all that it scores.
        """

        head: str | None = None
        tree: bool = True

        def __post_init__(self) -> None:
            if self.head is not None and not isinstance(self.head, str | Path):
                raise ConfigError(f"head={self.head!r} must be a folder")
            super().__post_init__()

    def __init__(self, config: Config, target: LanguageModel) -> None:
        head = find(Dovetail, config.head, target)
        depths = head.config.depths_of(target.num_layers)
        super().__init__(config, target, Runner(target, head), depths, final=head.config.reads_final)
