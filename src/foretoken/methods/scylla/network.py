"""Scylla's network: D decoder layers over pairs of what the target's final norm gives and the token behind it.

    x_i = fc([e(x_{i+1}); f_i])   ──  D layers  ──  RMSNorm  ──  rows of the target's head: q of x_{i+2}

Paper: "Scaling Laws for Speculative Decoding", arXiv:2505.07858 (no code could be found; the network is taken from
descriptions of it). Differs: all layers have both of their norms, and what follows is taken behind the final norm,
where the target's f is, too; the MLP has by default a quarter of the target's channels; a head may score some tokens
only (``draft_vocab_size``), whose ids it stores.

Letters: D layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from foretoken.drafting.feature_heads.block import Block, Norm
from foretoken.drafting.feature_heads.stack import StackConfig, StackHead


@dataclass(frozen=True, kw_only=True)
class ScyllaConfig(StackConfig):
    """What a head is, and whose; its next feature is taken behind the final norm."""

    norm_output: bool = True


class Scylla(StackHead):
    """The head's weights.

    Args:
        config: what it is.
        shared: see :class:`StackHead`.
    """

    algorithm = "scylla"
    title = "Scylla head"
    option = "head"
    Config = ScyllaConfig
    config: ScyllaConfig

    def __init__(self, config: ScyllaConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = Norm(config.width, eps=config.norm_eps)

    def first_norm(self) -> nn.Module | None:
        return self.layer(0).input_layernorm
