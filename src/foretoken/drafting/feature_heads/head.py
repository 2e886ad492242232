"""A head over a target's hidden states: its arithmetic piece by piece, served by runner.py and unrolled by unroll.py.

    pair i      feature g_i of row i  ─┐
                token x_{i+1}         ─┴─ layers ── h_i ── head ── q of x_{i+2}
    drafting    what follows from h_i takes the place of g_{i+1}, which the target has not computed yet

Two ways of entering the first layer (``paired``):

    paired       attention reads [norm(e); norm(g)], the residual begins with g          EAGLE-3
    else         one mix of e and g enters the first layer: fc([e; g])                   EAGLE-2, Scylla
                                                            a gate between the two       Dovetail

Letters: T rows, F width of the target's states, W width, H query heads, G key/value heads, d head width, V vocabulary,
K draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.drafting.feature_heads.native.pairs import Pairing
from foretoken.drafting.feature_heads.state_head import StateHead
from foretoken.forward import anatomy
from foretoken.native.layout import Projection

Product = Callable[[Tensor], Tensor]
"""A product with a packed weight: float32 in, float32 out, and a row's bits depend on that row only."""


class Entry(Protocol):
    """:meth:`FeatureHead.mix` in two parts, because what follows from a token alone may be kept as a table.

    For a head whose pairs enter in a way of their own; see :meth:`FeatureHead.pairing` for the others.

    Attributes:
        width: O, of the token's part.
    """

    width: int

    def of_tokens(self, e_TW: Tensor) -> Tensor:
        """The token's part [T, O] of embeddings, float32."""
        ...

    def enter(self, g_TW: Tensor, part_TO: Tensor) -> Tensor:
        """What enters the first layer, float32 [T, W]."""
        ...


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

    def begin_norm(self) -> nn.Module | None:
        """The norm of a feature that a paired head's residual begins with; None: there is none."""
        return None

    def begin(self, g_TW: Tensor) -> Tensor:
        """Where a paired head's residual begins."""
        norm = self.begin_norm()
        return g_TW if norm is None else norm(g_TW)

    def mix(self, g_TW: Tensor, e_TW: Tensor) -> Tensor:
        """What enters the first layer of a head that is not paired, [..., W]."""
        mixed: Tensor = self.fc(torch.cat([e_TW, g_TW], dim=-1))
        return mixed

    def entry(self, product: Callable[[Tensor], Product]) -> Entry | None:
        """:meth:`mix` in its two parts; None: the native decoder takes pairs as :meth:`pairing` says.

        Args:
            product: packs a weight [O, K].
        """
        return None

    def pairing(self, embedding_VW: Tensor, table_bytes: int) -> Pairing:
        """How pairs enter the native decoder.

        Args:
            embedding_VW: of the tokens.
            table_bytes: of a table of the tokens' parts, at most.
        """
        width = self.config.width
        behind = self.norm.weight if self.config.norm_output and self.norm is not None else None
        if not self.paired:
            token_WW, feature_WW = self.fc.weight.split((width, width), dim=1)
            return Pairing(
                embedding_VW,
                Projection(token_WW),
                feature=Projection(feature_WW, self.fc.bias),
                behind_W=behind,
                final_norm=self.norm is not None,
                table_bytes=table_bytes,
            )
        layer, norm = self.layer(0), self.begin_norm()
        heads = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        return Pairing(
            embedding_VW,
            Projection(torch.cat([each.weight[:, :width] for each in heads])),
            token_norm_W=layer.input_layernorm.weight,
            before_W=getattr(norm, "weight", None),
            behind_W=behind,
            final_norm=self.norm is not None,
            table_bytes=table_bytes,
        )

    def open(self, g_TW: Tensor, e_TW: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads of pairs, and where their residual begins.

        Args:
            g_TW, e_TW: features, and embeddings of the tokens behind them, [..., W].
        """
        x_TW = self.begin(g_TW) if self.paired else self.mix(g_TW, e_TW)
        norm = self.first_norm()
        read = x_TW if norm is None else norm(x_TW)
        return (torch.cat([self.layer(0).input_layernorm(e_TW), read], dim=-1) if self.paired else read), x_TW

    def following(self, h_TW: Tensor) -> Tensor:
        """The feature that stands for the target's at the next position."""
        return self.read_out(h_TW) if self.config.norm_output else h_TW

    # ------------------------------------------------------------------ beginnings

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Begin where the deepest feature is handed on as it is, and normed as the target norms it.

        Embeddings that are mixed with it count as if they had a standard deviation of 1: they are often much smaller
        than states, and what is so quiet is learnt late.
        """
        width = self.config.width
        if self.config.target_width != width:
            return
        self.fc.weight.mul_(0.3)
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)
        if not self.paired:
            self.fc.weight[:, :width] /= self.embedding_of(model).float().std().clamp(1e-3, 1.0)
        gain_D = anatomy.gain_of(anatomy.find(model).final_norm)
        normed = self.config.reads_final  # then the feature was normed already
        if not normed and self.norm is not None and gain_D is not None and gain_D.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain_D)
