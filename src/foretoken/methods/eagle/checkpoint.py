"""EAGLE's draft network as a folder: tensors, vocabulary maps, and its target; adaptation to a grown target.

Letters: W width, N states of a row, F width of a state, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import fields_for
from foretoken.drafting.feature_heads.draft_ids import spread_ids
from foretoken.drafting.published.vocabulary_maps import check_tables, maps_of
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, EagleConfig, from_settings, to_settings
from foretoken.methods.eagle.makers import in_our_form
from foretoken.methods.eagle.network import EagleNetwork
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

_EAGLE2_NAMES = (("layers.0.", "transformer."), ("fc.", "fusion_fc."))


class Eagle(EagleNetwork):
    """The network of a folder; see :class:`foretoken.drafting.learned_part.LearnedPart`."""

    algorithm = "eagle"
    model_types = (EAGLE3, EAGLE2)
    title = "EAGLE head"
    option = "head"
    Config = EagleConfig
    size_names = {"width": "target_hidden_size", "vocabulary": "transformer_layer_config.vocab_size"}  # noqa: RUF012

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights, bf16, and the two maps between the vocabularies."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        if self.config.algorithm == EAGLE2:
            return {_renamed(name, _EAGLE2_NAMES): value for name, value in found.items()}
        if self.ids_K is not None:
            found |= maps_of(self.ids_K, self.config.vocab_size)
        return found

    @classmethod
    def random(
        cls,
        target: LanguageModel,
        *,
        algorithm: str = EAGLE3,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> Eagle:
        """Return an untrained network, which passes its deepest state to the target's own LM head.

        Args:
            draft_vocab_size: number of scored tokens, evenly spread over the vocabulary; None or too many: all.
            fields: further fields of the config.
        """
        config = config_for(
            target.config,
            target.name,
            fingerprint_of(target.source),
            algorithm=algorithm,
            draft_vocab_size=None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size),
            **fields,
        )
        network = cls(config, ids_K=spread_ids(config))
        network.draw(torch.Generator().manual_seed(seed), spread=0.2)
        network.begin_near(target.model)
        return network.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: EagleConfig | None = None) -> str:
        """Return the command that trains a network."""
        return f"foretoken train eagle --target {target} --out DIR"

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width, vocabulary or depth.

        Raises:
            MismatchError: names the differing field of ``config.json``.
        """
        super().check_shape(model)
        check_tables(self, model)
        config = self.config
        depths = config.taps.of(model.num_layers)
        if min(depths) < 1 or max(depths) > model.num_layers:
            raise MismatchError(
                f"the EAGLE head's eagle_aux_hidden_state_layer_ids are {list(depths)}, but '{model.name}' has "
                f"{model.num_layers} layers"
            )

    @classmethod
    def _own_layout(cls, settings: Any, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        return in_our_form(settings, tensors)

    def _settings(self) -> dict[str, Any]:
        return to_settings(self.config)

    @classmethod
    def _fields(cls, settings: Any) -> dict[str, Any]:
        return from_settings(settings)


def config_for(
    config: Any,
    target: str,
    fingerprint: str,
    *,
    algorithm: str = EAGLE3,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    **fields: Any,
) -> EagleConfig:
    """Return the config of a network that fits a model of transformers: sizes as of ``fields_for``, depths as
    (2, L/2, L-3) of 32 layers.

    Args:
        config: the target's configuration.
        draft_vocab_size: None: the whole vocabulary.
        fields: further fields of :class:`EagleConfig`.
    Raises:
        UnsupportedArchitecture: the target's configuration lacks a size.
    """
    found = fields_for(
        config, target, fingerprint, title=Eagle.title, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width
    )
    layers = config.get_text_config(decoder=True).num_hidden_layers
    depths = (max(1, round(layers * 2 / 32)), max(1, layers // 2), max(1, round(layers * 29 / 32)))
    found |= {"algorithm": algorithm, "depths": depths if algorithm == EAGLE3 else ()}
    return EagleConfig(**{**found, **fields})


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
