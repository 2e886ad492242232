"""Scylla's head: several decoder layers over pairs of what the target's final norm gives and the token behind it.

    x_i = fc([e(x_{i+1}); f_i])   ──  D layers  ──  RMSNorm  ──  rows of the target's head: q of x_{i+2}

Paper: "Scaling Laws for Speculative Decoding", arXiv:2505.07858 (no code could be found; the network is taken from
descriptions of it). Differs: all layers have both of their norms, and what follows is taken behind the final norm,
where the target's f is, too; the MLP has by default a quarter of the target's channels; a head may score some tokens
only (``draft_vocab_size``), whose ids it stores.

Letters: W width, V vocabulary, K draft vocabulary, D layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.drafting.feature_heads.block import Block, BlockConfig, Norm, fields_for
from foretoken.drafting.feature_heads.draft_ids import IDS, checked_ids, spread_ids
from foretoken.drafting.feature_heads.head import FeatureHead
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

LAYERS = 2
MOST_LAYERS = 32


@dataclass(frozen=True, kw_only=True)
class ScyllaConfig(BlockConfig):
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


class Scylla(FeatureHead):
    """The head's weights.

    Args:
        config: what it is.
        ids_K: int64, increasing: the tokens that it scores; None: all.
    """

    algorithm = "scylla"
    title = "Scylla head"
    option = "head"
    Config = ScyllaConfig
    config: ScyllaConfig
    paired = False

    def __init__(self, config: ScyllaConfig, *, ids_K: Tensor | None = None) -> None:
        super().__init__(config, ids_K=ids_K)
        self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = Norm(config.width, eps=config.norm_eps)

    def first_norm(self) -> nn.Module | None:
        return self.layer(0).input_layernorm

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the ids of the tokens that it scores."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        return found if self.ids_K is None else {**found, IDS: self.ids_K}

    @classmethod
    def of(cls, config: ScyllaConfig, tensors: Mapping[str, Tensor]) -> Scylla:
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
        cls,
        target: LanguageModel,
        *,
        layers: int = LAYERS,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> Scylla:
        """A head that nobody trained, which hands the target's feature on.

        Args:
            draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
            fields: others of the config.
        """
        size = None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size)
        fingerprint = fingerprint_of(target.source)
        config = config_for(target.config, target.name, fingerprint, layers=layers, draft_vocab_size=size, **fields)
        head = cls(config, ids_K=spread_ids(config))
        head.draw(torch.Generator().manual_seed(seed), spread=0.2)
        head.begin_near(target.model)
        return head.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: ScyllaConfig | None = None) -> str:
        """The command that trains a head."""
        return f"foretoken train scylla --target {target} --out DIR"


def config_for(
    config: Any,
    target: str,
    fingerprint: str,
    *,
    layers: int = LAYERS,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    **fields: Any,
) -> ScyllaConfig:
    """A head that fits a model of transformers; see ``fields_for``.

    Args:
        config: the target's configuration.
        draft_vocab_size: None: all of the vocabulary.
        fields: others of :class:`ScyllaConfig`.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes.
    """
    found = fields_for(
        config, target, fingerprint, title=Scylla.title, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width
    )
    return ScyllaConfig(**{**found, "layers": layers, "norm_output": True, **fields})
