"""EAGLE's draft network as a folder: tensors, vocabulary maps, and its target; adaptation to a grown target.

Letters: W width, N states of a row, F width of a state, V vocabulary, K draft vocabulary.
"""

from typing import Any

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.published.vocabulary_maps import check_tables
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, EagleConfig, from_settings, to_settings
from foretoken.methods.eagle.makers import in_our_form
from foretoken.methods.eagle.network import EagleNetwork
from foretoken.models.language_model import LanguageModel

_EAGLE2_NAMES = (("layers.0.", "transformer."), ("fc.", "fusion_fc."))


class Eagle(EagleNetwork):
    """The network of a folder; see :class:`foretoken.drafting.learned_part.LearnedPart`."""

    algorithm = "eagle"
    model_types = (EAGLE3, EAGLE2)
    title = "EAGLE head"
    Config = EagleConfig
    size_names = {"width": "target_hidden_size", "vocabulary": "transformer_layer_config.vocab_size"}  # noqa: RUF012

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights in bfloat16 under the names of their layout, and the maps between the vocabularies."""
        found, names = super().tensors(), _EAGLE2_NAMES if self.config.algorithm == EAGLE2 else ()
        return {_renamed(name, names): value for name, value in found.items()}

    @classmethod
    def shape_for(cls, num_layers: int) -> dict[str, Any]:
        """Read the target at depths that are (2, L/2, L-3) of 32 layers."""
        shares = round(num_layers * 2 / 32), num_layers // 2, round(num_layers * 29 / 32)
        return {"depths": tuple(max(1, depth) for depth in shares)}

    @classmethod
    def config_for(cls, config: Any, target: str, fingerprint: str, **fields: Any) -> EagleConfig:
        """See :meth:`foretoken.drafting.feature_heads.state_network.StateNetwork.config_for`."""
        if fields.get("algorithm") == EAGLE2:  # it reads the last state
            fields = {"depths": (), **fields}
        return super().config_for(config, target, fingerprint, **fields)

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


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
