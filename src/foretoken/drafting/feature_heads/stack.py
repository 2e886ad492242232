"""Networks of several decoder layers over the output of a target's final norm: Scylla's and Dovetail's.

Letters: K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import BlockConfig, fields_for
from foretoken.drafting.feature_heads.description import Fuse, Taps
from foretoken.drafting.feature_heads.draft_ids import IDS, checked_ids, spread_ids
from foretoken.drafting.feature_heads.pair_network import LayeredNetwork
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

LAYERS = 2
MOST_LAYERS = 32

_Network = TypeVar("_Network", bound="StackNetwork")


@dataclass(frozen=True, kw_only=True)
class StackConfig(BlockConfig):
    """The sizes of a network, and its target.

    Attributes:
        layers: D.
    """

    sizes = (*BlockConfig.sizes, "layers")

    layers: int = LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers={self.layers}: {MOST_LAYERS} at most")

    @property
    def taps(self) -> Taps:
        return Taps(final=True)

    @property
    def fuse(self) -> Fuse:
        """The state is the feature; of a grown target, which divides it among copies, the first in full."""
        return Fuse(first_copy=None if self.target_width == self.width else self.width)


class StackNetwork(LayeredNetwork):
    """Files and beginnings of such networks; a subclass makes the weights.

    Args:
        config: its sizes, and its target.
        ids_K, own_head, own_embedding: see :class:`LayeredNetwork`.
    """

    config: StackConfig

    def original(self, states_SF: Tensor) -> Tensor:
        """The states of the target as the plain forward reads them; of a grown one those of the original."""
        width = self.config.width
        return states_SF if self.config.target_width == width else 2 * states_SF[..., :width]

    def check_shape(self, model: LanguageModel) -> None:
        super().check_shape(model)
        if self.config.width != self.config.target_width and self.lm_head is None:
            raise MismatchError(
                f"the {self.title} is {self.config.width} wide and reads {self.config.target_width} columns: without "
                "tables of its own it must be as wide as its target"
            )

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the ids of the tokens that it scores."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        return found if self.ids_K is None else {**found, IDS: self.ids_K}

    @classmethod
    def of(cls: type[_Network], config: StackConfig, tensors: Mapping[str, Tensor]) -> _Network:
        """The network of a config and saved weights, float32.

        Raises:
            ValueError: they do not fit each other; the tensor is named.
        """
        found = dict(tensors)
        network = cls(config, ids_K=checked_ids(config, found.pop(IDS, None)))
        network.take(found)
        return network.eval()

    @classmethod
    def random(
        cls: type[_Network],
        target: LanguageModel,
        *,
        layers: int = LAYERS,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> _Network:
        """An untrained network, which hands the target's feature on.

        Args:
            draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
            fields: others of the config.
        """
        size = None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size)
        fingerprint = fingerprint_of(target.source)
        config = cls.config_for(target.config, target.name, fingerprint, layers=layers, draft_vocab_size=size, **fields)
        network = cls(config, ids_K=spread_ids(config))
        network.draw(torch.Generator().manual_seed(seed), spread=0.2)
        network.begin_near(target.model)
        return network.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: StackConfig | None = None) -> str:
        """The command that trains one."""
        return f"foretoken train {cls.algorithm} --target {target} --out DIR"

    @classmethod
    def config_for(
        cls,
        config: Any,
        target: str,
        fingerprint: str,
        *,
        layers: int = LAYERS,
        draft_vocab_size: int | None = None,
        mlp_width: int | None = None,
        **fields: Any,
    ) -> Any:
        """A config that fits a model of transformers; see ``fields_for``.

        Args:
            config: the target's configuration.
            draft_vocab_size: None: all of the vocabulary.
            fields: others of the config.
        Raises:
            UnsupportedArchitecture: the target does not say its sizes.
        """
        found = fields_for(
            config, target, fingerprint, title=cls.title, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width
        )
        return cls.Config(**{**found, "layers": layers, **fields})
