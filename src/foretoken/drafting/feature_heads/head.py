"""A head over a target's hidden states: its arithmetic piece by piece, served by runner.py and unrolled by unroll.py.

    pair i      feature g_i of row i  ─┐
                token x_{i+1}         ─┴─ layers ── h_i ── head ── q of x_{i+2}
    drafting    what follows from h_i takes the place of g_{i+1}, which the target has not computed yet

Two ways of entering the first layer (``paired``):

    paired       attention reads [norm(e); norm(g)], the residual begins with g          EAGLE-3
    else         x = fc([e; g]) enters the first layer                                   EAGLE-2, Scylla

Letters: T rows, F width of the target's states, W width, H query heads, G key/value heads, d head width, V vocabulary,
K draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.drafting.feature_heads.state_head import StateHead
from foretoken.models import anatomy


class FeatureHead(StateHead):
    """What heads over pairs have in common; a subclass makes ``fc``, ``norm`` and ``layers``.

    Attributes:
        paired: see above.
    """

    paired: bool
    fc: nn.Linear

    # ------------------------------------------------------------------ the arithmetic

    def prepare(self, states_TF: Tensor) -> Tensor:
        """What the fusion of a paired head reads of the target's states."""
        return states_TF

    def fuse(self, states_TF: Tensor) -> Tensor:
        """Features [..., W] of the target's states [..., F], the depths side by side."""
        return self.fc(self.prepare(states_TF)) if self.paired else states_TF

    @abstractmethod
    def first_norm(self) -> nn.Module | None:
        """The norm between the residual stream and the first layer's attention; None: there is none."""

    def begin(self, g_TW: Tensor) -> Tensor:
        """Where a paired head's residual begins."""
        return g_TW

    def open(self, g_TW: Tensor, e_TW: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads of pairs, and where their residual begins.

        Args:
            g_TW, e_TW: features, and embeddings of the tokens behind them, [..., W].
        """
        x_TW = self.begin(g_TW) if self.paired else self.fc(torch.cat([e_TW, g_TW], dim=-1))
        norm = self.first_norm()
        read = x_TW if norm is None else norm(x_TW)
        return (torch.cat([self.layer(0).input_layernorm(e_TW), read], dim=-1) if self.paired else read), x_TW

    def following(self, h_TW: Tensor) -> Tensor:
        """The feature that stands for the target's at the next position."""
        return self.read_out(h_TW) if self.config.norm_output else h_TW

    # ------------------------------------------------------------------ beginnings

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Begin where the deepest feature is handed on as it is, and normed as the target norms it."""
        width = self.config.width
        if self.config.target_width != width:
            return
        self.fc.weight.mul_(0.3)
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)
        gain = getattr(anatomy.find(model).final_norm, "weight", None)
        normed = self.config.reads_final  # then the feature was normed already
        if not normed and self.norm is not None and isinstance(gain, Tensor) and gain.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain)
