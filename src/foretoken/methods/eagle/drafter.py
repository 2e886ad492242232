"""EAGLE: a decoder layer over the target's own hidden states drafts a chain or a tree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from foretoken.core.draft import PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.drafting.feature_heads.drafter import FeatureDrafter, HeadOptions
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.learned_part import find
from foretoken.drafting.published.probe import PROBE, compared
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Option


class EagleDrafter(FeatureDrafter):
    """Drafts with a head over the target's hidden states.

    Paper:   EAGLE-2, arXiv:2406.16858: the dynamic tree (sections 4.1 and 4.2); EAGLE-3, arXiv:2503.01840: the head.
             The config in the head's folder names the network.
    Exact:   chains and drawn trees carry the q of their samples (a point mass at temperature 0), other trees are point
             masses; a token outside of the draft vocabulary has q = 0. Lossless under any lossless verifier of these
             draft kinds.
    Differs: chains are supported, and the default; batches, each request with its own draft; the adaptive controller
             may end a draft before its next node is sampled, depending on q alone. A tree's children are
             deterministic as in the released code, and declared so; ``draw`` draws them.
    """

    name = "eagle"
    declared = Declared(
        learned_part="foretoken.methods.eagle.checkpoint:Eagle",
        variants=(
            Variant(),
            Variant(options={"tree": True, "width": 4, "max_depth": 4}, laws=(PointMass,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadOptions):
        """Options of EAGLE."""

        head: Annotated[
            str | Path | None,
            Option(
                "A folder of `foretoken train eagle`, or a published one (SafeAILab, SpecForge, speculators, ModelOpt, "
                "DeepSpec, NeMo); None: `eagle` in the folder of the target's weights."
            ),
        ] = None
        probe: Annotated[bool, PROBE] = True

    def __init__(self, config: Config, target: LanguageModel) -> None:
        network, self.explanation = compared(find(Eagle, config.head, target), target, config.probe)
        description, runner = network.description, Runner(target, network, config.dtype)
        masks = None
        if description.masks is not None:
            if config.tree:
                raise ConfigError("tree=True: P-EAGLE drafts a chain in one pass, and no tree; leave it out")
            masks = (
                description.masks.token,
                runner.features(network.get_parameter(description.masks.states)[0].detach()),
            )
        super().__init__(config, target, runner, description.taps, masks, config.draw)
