"""MTP: a checkpoint's own layer for predicting one more token drafts a chain or a tree."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.core.draft import PointMass
from foretoken.core.needs import Declared, Variant
from foretoken.drafting.feature_heads.drafter import FeatureDrafter, GrowthOptions
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import read_layer
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Option


class MtpDrafter(FeatureDrafter):
    """Drafts by repeated passes of the target's own next-token-prediction layer.

    Paper:   DeepSeek-V3, arXiv:2412.19437, section 2.2 and 5.4.3; GLM-4.5, arXiv:2508.06471.
    Exact:   chains carry the q of their samples (a point mass at temperature 0), trees are point masses.
    Differs: one layer drafts every depth and reads its own output instead of the target's feature, as in vLLM and
             SGLang; the paper trains a layer for each depth, and published checkpoints contain the first. Trees, too.
    """

    name = "mtp"
    declared = Declared(
        brought=True,
        variants=(
            Variant(),
            Variant(options={"norm_output": False, "max_depth": 2}, one_rule=True),
            Variant(options={"tree": True, "width": 3, "max_depth": 3}, laws=(PointMass,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(GrowthOptions):
        """Options of MTP."""

        max_depth: Annotated[int, Option("Longest path of a draft.", least=1, most=64)] = 3
        norm_output: Annotated[
            bool, Option("The layer reads its own output after its norm, as in SGLang; false: before it, as in vLLM.")
        ] = True

    def __init__(self, config: Config, target: LanguageModel) -> None:
        tensors = read_layer(target.config, target.source, target.name)
        layer = PredictionLayer(target.model, target.name, tensors, norm_output=config.norm_output)
        super().__init__(config, target, Runner(target, layer), layer.description.taps)
