"""Dovetail's draft network: m decoder blocks over the target's feature, gated with the following token.

    h1 = F W1                          F: the output of the target's final norm at position i
    h2 = SiLU(RMSNorm(e) W2)           e: the embedding of token i + 1
    g  = sigmoid([h1; h2] Wz)
    f  = g h1 + (1 - g) h2             Dynamic Gating Fusion; [e; F] W in its place is EAGLE-2's ("concat")

    f ── m blocks, the first one without its norm before attention ── F̂ of position i + 1 ── the target's LM head

Paper: arXiv:2412.18934, section 3 (as in the released code: SiLU and norm on the token's side only). Differs:
W1 is initialised as twice the identity, and the gate near one half, so that the target's feature passes through; by
default the MLP has a quarter of the target's channels; a network may score a subset of tokens (``draft_vocab_size``)
and stores their ids.

Letters: S rows of the target, T pairs, F width of the target's states, W width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.drafting.feature_heads.block import Block, Norm
from foretoken.drafting.feature_heads.description import (
    Concatenated,
    Entry,
    Gated,
    Layers,
    LmHead,
    NetworkDescription,
    Recycle,
)
from foretoken.drafting.feature_heads.stack import StackConfig, StackNetwork

GATE, CONCAT = "gate", "concat"
FUSIONS = (GATE, CONCAT)


@dataclass(frozen=True, kw_only=True)
class DovetailConfig(StackConfig):
    """The sizes of a network, and its target.

    Attributes:
        layers: m, decoder blocks.
        fusion: "gate", or "concat" for EAGLE-2's fusion.
    """

    fusion: str = GATE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion={self.fusion!r}: '{GATE}' or '{CONCAT}'")


def describe(config: DovetailConfig) -> NetworkDescription:
    """Describe the network as data; equal to :meth:`Dovetail.forward`."""
    gate = Gated("fusion.feature", "fusion.token", "fusion.gate", "fusion.norm")
    entry: Entry = gate if config.fusion == GATE else Concatenated("fc")
    return NetworkDescription(
        taps=config.taps,
        fuse=config.fuse,
        entry=entry,
        layers=Layers(config.layers, first_norm=False),
        recycle=Recycle(normed=config.norm_output),
        lm_head=LmHead(norm=None),
    )


class GatedFusion(nn.Module):
    """Dynamic Gating Fusion: each channel is a learned mix of feature and token."""

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__()
        width = config.width
        self.norm = Norm(width, eps=config.norm_eps)
        self.feature = nn.Linear(width, width, bias=False)  # W1
        self.token = nn.Linear(width, width, bias=False)  # W2
        self.gate = nn.Linear(2 * width, width, bias=False)  # Wz

    def forward(self, feature_TW: Tensor, e_TW: Tensor) -> Tensor:
        """f, [T, W]."""
        h1 = self.feature(feature_TW)
        h2 = F.silu(self.token(self.norm(e_TW)))
        g = self.gate(torch.cat([h1, h2], dim=-1)).sigmoid()
        return g * h1 + (1 - g) * h2


class Dovetail(StackNetwork):
    """The weights of Dovetail's draft network.

    Args:
        config: its sizes.
        shared: see :class:`StackNetwork`.
    """

    algorithm = "dovetail"
    title = "Dovetail head"
    Config = DovetailConfig
    config: DovetailConfig

    def __init__(self, config: DovetailConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.description = describe(config)
        if config.fusion == GATE:
            self.fusion = GatedFusion(config)
        else:
            self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        blocks = (Block(config, normed=bool(number), window=config.window) for number in range(config.layers))
        self.layers = nn.ModuleList(blocks)

    def forward(self, states_SF: Tensor, tokens_T: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the inputs of the LM head, [T, W]; see :class:`PairNetwork`."""
        e = F.embedding(tokens_T, embedding_VW)
        feature = self.original(states_SF)
        while True:
            known = e[: len(feature)]
            if self.config.fusion == GATE:
                x = self.fusion(feature, known)
            else:
                x = self.fc(torch.cat([known, feature], dim=-1))
            for number in range(self.config.layers):
                block = self.layer(number)
                normed = block.input_layernorm(x) if number else x
                x = block(normed, x, *self.rotary_at(torch.arange(len(feature))))
            if len(feature) == len(tokens_T):
                return x
            feature = torch.cat([feature, x[-1:]])  # F̂ replaces the target's feature
