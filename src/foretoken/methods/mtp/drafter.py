"""MTP: the layer that a checkpoint brings for predicting one more token drafts a chain or a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.draft import PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.drafting.feature_heads.drafter import FeatureDrafter, GrowthOptions
from foretoken.forward.attention import following
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.methods.mtp.layer import PredictionLayer
from foretoken.methods.mtp.shards import read_layer
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output


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
                (docs/methods/vocabtrim.md), of a layer that scores with the target's own head; None: all.
            norm_output: the layer reads its own output behind its norm, as SGLang has it; else before, as vLLM has it.
        """

        max_depth: int = 3
        norm_output: bool = True

        def __post_init__(self) -> None:
            if not isinstance(self.norm_output, bool):
                raise ConfigError(f"norm_output={self.norm_output!r} must be true or false")
            super().__post_init__()

    def __init__(self, config: Config, target: LanguageModel) -> None:
        layer = PredictionLayer(target.model, target.name, read_layer(target.config, target.source, target.name))
        runner = _Runner(target, layer, config.norm_output)
        super().__init__(config, target, runner, (target.num_layers,), final=True)


class _Runner:
    """The layer over packed rows and a cache of its own, through the library's modules."""

    num_layers = 1
    ahead = None

    def __init__(self, target: LanguageModel, layer: PredictionLayer, norm_output: bool) -> None:
        self._target, self._layer, self._norm_output = target, layer, norm_output
        self.scored = target.vocab_size
        self.odd_rows = "a head of its own (shared_head.head)" if layer.own_head else None

    def features(self, states_TF: Tensor) -> Tensor:
        """The states as they are: the final norm has been applied."""
        return states_TF.to(self._target.dtype)

    @torch.inference_mode()
    def forward(
        self, batch: PackedBatch, cache: KVCache, g_TW: Tensor, *, top: int, rows: HeadRows | None = None
    ) -> tuple[Output, Tensor]:
        """See :class:`foretoken.drafting.feature_heads.drafter.HeadRunner`."""
        device = self._target.device
        positions_1T, ids_T = batch.positions_1T(device), batch.ids_1T(device)[0]
        with following(DensePlan(cache, batch)):
            h_MW = self._layer(ids_T, g_TW, positions_1T)[batch.wanted]
        if not batch.wanted:
            return Output.of(h_MW), h_MW
        following_MW = self._layer.feature(h_MW, self._norm_output)
        if rows is not None:
            return self._target.score(self._layer.norm(h_MW), top=top, final_norm=False, head=rows), following_MW
        return Output.of(self._layer.score(h_MW), top=top), following_MW
