"""MTP: the layer that a checkpoint brings for predicting one more token drafts a chain or a tree."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core.draft import PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.drafting.feature_heads.drafter import FeatureDrafter, GrowthOptions
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import read_layer
from foretoken.models.language_model import LanguageModel


class MtpDrafter(FeatureDrafter):
    """Drafts with the target's own next-token-prediction layer, over and over.

    Paper:   DeepSeek-V3, arXiv:2412.19437, section 2.2 and 5.4.3; GLM-4.5, arXiv:2508.06471.
    Exact:   chains carry the q they were drawn from (a point mass at temperature 0), trees are point masses.
    Differs: one layer drafts every depth, its own output in place of the target's feature, as vLLM and SGLang do; the
             paper trains a layer for each depth, of which published checkpoints bring the first. Trees, too.
    """

    name = "mtp"
    declared = Declared(
        brought="foretoken.methods.mtp.train:untrained",
        variants=(
            Variant(),
            Variant(options={"norm_output": False, "max_depth": 2}, one_rule=True),
            Variant(options={"tree": True, "width": 3, "max_depth": 3}, laws=(PointMass,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(GrowthOptions):
        """Options of MTP.

        Attributes:
            tree: propose a tree of the most probable continuations instead of a chain.
            max_depth: longest path of a draft.
            width: of a tree: continuations recorded at a node, and nodes expanded at a level.
            draft_vocab: a folder of `foretoken calibrate vocabulary`: only its tokens are scored and drafted
                (docs/methods/vocabtrim.md), if the layer scores with the target's own LM head; None: all.
            norm_output: the layer's next feature is the output of its norm, as in SGLang; else the norm's input, as in
                vLLM.
        """

        max_depth: int = 3
        norm_output: bool = True

        def __post_init__(self) -> None:
            if not isinstance(self.norm_output, bool):
                raise ConfigError(f"norm_output={self.norm_output!r} must be true or false")
            super().__post_init__()

    def __init__(self, config: Config, target: LanguageModel) -> None:
        tensors = read_layer(target.config, target.source, target.name)
        layer = PredictionLayer(target.model, target.name, tensors, norm_output=config.norm_output)
        super().__init__(config, target, Runner(target, layer), layer.description.taps)
