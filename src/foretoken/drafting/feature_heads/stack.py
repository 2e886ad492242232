"""Heads of several decoder layers over what a target's final norm gives: Scylla's and Dovetail's.

Letters: K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import BlockConfig, fields_for
from foretoken.drafting.feature_heads.draft_ids import IDS, checked_ids, spread_ids
from foretoken.drafting.feature_heads.head import FeatureHead
from foretoken.forward import anatomy
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.grown import Origin
from foretoken.models.language_model import LanguageModel

LAYERS = 2
MOST_LAYERS = 32

_Head = TypeVar("_Head", bound="StackHead")


@dataclass(frozen=True, kw_only=True)
class StackConfig(BlockConfig):
    """What a head is, and whose.

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
    def reads_final(self) -> bool:
        return True

    def depths_of(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers,)


class StackHead(FeatureHead):
    """The head's weights; a subclass makes them.

    Args:
        config: what it is.
        ids_K, own_head, own_embedding: see :class:`FeatureHead`.
    """

    grows = True
    config: StackConfig
    paired = False

    def fuse(self, states_TF: Tensor) -> Tensor:
        """Features [..., W]; of a grown target, whose final norm carries shares, the first copy in full."""
        width = self.config.width
        return states_TF if self.config.target_width == width else 2 * states_TF[..., :width]

    def grown(self: _Head, target: LanguageModel, origin: Origin) -> _Head:
        """The same drafts for a model that was grown from its target, at the same cost.

        It reads the first copy in the stream, which is the original's; tables of the original's width come with it.
        """
        origin.check_shared(self.title, target.name)
        parts, width = anatomy.find(target.model), self.config.width
        wide, mark = target.config.get_text_config(decoder=True).hidden_size, fingerprint_of(target.source)
        config = replace(self.config, target=target.name, target_fingerprint=mark, target_width=wide)
        head = type(self)(config, ids_K=self.ids_K, own_head=True, own_embedding=True)
        rows_VW, table_VW = (cast(Any, part).weight.detach()[:, :width].cpu() for part in (parts.head, parts.embedding))
        kept_KW = rows_VW if self.ids_K is None else rows_VW[self.ids_K]
        head.take({**self.state_dict(), "lm_head.weight": kept_KW, "embed_tokens.weight": table_VW})
        return head.eval()

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
    def of(cls: type[_Head], config: StackConfig, tensors: Mapping[str, Tensor]) -> _Head:
        """The head that a config and saved weights describe, float32.

        Raises:
            ValueError: they do not fit each other; the tensor is named.
        """
        found = dict(tensors)
        head = cls(config, ids_K=checked_ids(config, found.pop(IDS, None)))
        head.take(found)
        return head.eval()

    @classmethod
    def random(
        cls: type[_Head],
        target: LanguageModel,
        *,
        layers: int = LAYERS,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> _Head:
        """A head that nobody trained, which hands the target's feature on.

        Args:
            draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
            fields: others of the config.
        """
        size = None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size)
        fingerprint = fingerprint_of(target.source)
        config = cls.config_for(target.config, target.name, fingerprint, layers=layers, draft_vocab_size=size, **fields)
        head = cls(config, ids_K=spread_ids(config))
        head.draw(torch.Generator().manual_seed(seed), spread=0.2)
        head.begin_near(target.model)
        return head.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: StackConfig | None = None) -> str:
        """The command that trains a head."""
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
        """A config of this head that fits a model of transformers; see ``fields_for``.

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
