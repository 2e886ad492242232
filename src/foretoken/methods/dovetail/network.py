"""Dovetail's network: m decoder blocks behind a gate between the target's feature and the token behind it.

    h1 = F W1                          F: what the target's final norm gives at position i
    h2 = SiLU(RMSNorm(e) W2)           e: the embedding of token i + 1
    g  = sigmoid([h1; h2] Wz)
    f  = g h1 + (1 - g) h2             Dynamic Gating Fusion; [e; F] W in its place is EAGLE-2's ("concat")

    f ── m blocks, the first one without its norm before attention ── F̂ of position i + 1 ── the target's head

Paper: arXiv:2412.18934, section 3 (as the released code computes it: SiLU and norm on the token's side only). Differs:
W1 begins as twice the identity, and the gate near one half, so that the target's feature is handed on; the MLP has by
default a quarter of the target's channels; a head may score some tokens only (``draft_vocab_size``), whose ids it
stores.

Letters: T rows, W width, O columns of the token's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.drafting.feature_heads.block import Block, Norm
from foretoken.drafting.feature_heads.head import Entry, Product
from foretoken.drafting.feature_heads.stack import StackConfig, StackHead

GATE, CONCAT = "gate", "concat"
FUSIONS = (GATE, CONCAT)


@dataclass(frozen=True, kw_only=True)
class DovetailConfig(StackConfig):
    """What a head is, and whose.

    Attributes:
        layers: m, decoder blocks.
        fusion: "gate", or "concat" for EAGLE-2's.
    """

    fusion: str = GATE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion={self.fusion!r}: '{GATE}' or '{CONCAT}'")


class GatedFusion(nn.Module):
    """Dynamic Gating Fusion: how much of each channel comes from the feature, and how much from the token."""

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__()
        width = config.width
        self.norm = Norm(width, eps=config.norm_eps)
        self.feature = nn.Linear(width, width, bias=False)
        self.token = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(2 * width, width, bias=False)

    def forward(self, g_TW: Tensor, e_TW: Tensor) -> Tensor:
        """[..., W] of features and embeddings."""
        h1_TW, h2_TW = self.feature(g_TW), F.silu(self.token(self.norm(e_TW)))
        return mixed(h1_TW, h2_TW, self.gate(torch.cat([h1_TW, h2_TW], dim=-1)))


def mixed(h1_TW: Tensor, h2_TW: Tensor, z_TW: Tensor) -> Tensor:
    """g h1 + (1 - g) h2 with g = sigmoid(z)."""
    g_TW = z_TW.sigmoid()
    return g_TW * h1_TW + (1 - g_TW) * h2_TW


class _GatedEntry:
    """The same in its two parts: h2 and its half of the gate follow from the token alone."""

    def __init__(self, fusion: GatedFusion, product: Callable[[Tensor], Product]) -> None:
        one = fusion.feature.out_features
        self.width = 2 * one
        self._norm = fusion.norm
        self._feature, self._token = product(fusion.feature.weight), product(fusion.token.weight)
        self._feature_gate, self._token_gate = (product(half) for half in fusion.gate.weight.split(one, dim=1))

    def of_tokens(self, e_TW: Tensor) -> Tensor:
        h2_TW = F.silu(self._token(self._norm(e_TW)))
        return torch.cat([h2_TW, self._token_gate(h2_TW)], dim=-1)

    def enter(self, g_TW: Tensor, part_TO: Tensor) -> Tensor:
        h1_TW = self._feature(g_TW)
        h2_TW, token_TW = part_TO.chunk(2, dim=-1)
        return mixed(h1_TW, h2_TW, self._feature_gate(h1_TW) + token_TW)


class Dovetail(StackHead):
    """The head's weights.

    Args:
        config: what it is.
        shared: see :class:`StackHead`.
    """

    algorithm = "dovetail"
    title = "Dovetail head"
    option = "head"
    Config = DovetailConfig
    config: DovetailConfig

    def __init__(self, config: DovetailConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        if config.fusion == GATE:
            self.fusion = GatedFusion(config)
        else:
            self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        self.layers = nn.ModuleList([Block(config, normed=bool(number)) for number in range(config.layers)])

    def first_norm(self) -> nn.Module | None:
        return None

    def mix(self, g_TW: Tensor, e_TW: Tensor) -> Tensor:
        if self.config.fusion == CONCAT:
            return super().mix(g_TW, e_TW)
        found: Tensor = self.fusion(g_TW, e_TW)
        return found

    def entry(self, product: Callable[[Tensor], Product]) -> Entry | None:
        return None if self.config.fusion == CONCAT else _GatedEntry(self.fusion, product)

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """See :class:`FeatureHead`; at a gate of one half, half of W1's output enters the blocks."""
        if self.config.fusion == CONCAT:
            super().begin_near(model)
        elif self.config.target_width == self.config.width:
            weight_WW = self.fusion.feature.weight
            weight_WW.mul_(0.3)
            weight_WW += 2 * torch.eye(len(weight_WW), device=weight_WW.device)
            self.fusion.gate.weight.mul_(0.1)
