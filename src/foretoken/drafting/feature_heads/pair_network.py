"""Computes a draft network over pairs as its description says, by torch: of packed rows and in training alike.

    pair i      feature g_i of row i  ─┐
                token x_{i+1}         ─┴─ layers ── h_i ── LM head ── q of x_{i+2}
    drafting    the feature recycled from h_i replaces g_{i+1}, which the target has not computed yet

A method adds its weights, its description (description.py), and the plain ``forward`` of its paper.

Letters: S rows of the target, T rows, F width of the target's states side by side, W width, V vocabulary, K draft
vocabulary.
"""

from abc import abstractmethod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.protocols import Plan
from foretoken.drafting.feature_heads.description import Concatenated, Gated, NetworkDescription, Stacked
from foretoken.drafting.feature_heads.state_network import StateNetwork
from foretoken.forward import anatomy
from foretoken.forward.attention import following


class PairNetwork(nn.Module):
    """The weights, the description, and the arithmetic that follows from it.

    Attributes:
        description: of the arithmetic.
        ids_K: int64, increasing: the tokens that are scored; None: all.
    """

    description: NetworkDescription
    ids_K: Tensor | None

    @abstractmethod
    def forward(self, states_SF: Tensor, tokens_T: Tensor, embedding_VW: Tensor) -> Tensor:
        """The paper's network over one text, without a cache: input of the LM head, [T, W].

        Args:
            states_SF: the target's states of rows 0..S-1, the taps side by side.
            tokens_T: token i + 1 for pair i, T >= S; pairs from S on are drafted: they read the network's own output.
            embedding_VW: of the tokens.
        """

    @abstractmethod
    def embedding_of(self, model: Any) -> Tensor:
        """The table in which tokens are looked up, [V, W]: its own, or that of the target (a model of transformers)."""

    @abstractmethod
    def lm_head_of(self, model: Any) -> Tensor:
        """The rows that score its tokens, [K, W]: its own, or those of the target's LM head."""

    @property
    @abstractmethod
    def has_own_rows(self) -> bool:
        """Whether it scores with rows that are not the target's."""

    @property
    def num_layers(self) -> int:
        """Layers of its cache."""
        return self.description.layers.count

    @final
    def part(self, name: str | None) -> Any:
        """A module by its name in the description; without a name one that changes nothing."""
        return _unchanged if name is None else self.get_submodule(name)

    # ------------------------------------------------------------------ the arithmetic, piece by piece

    @final
    def normed_states(self, states_TF: Tensor) -> Tensor:
        """The states as the product of the fusion reads them."""
        fuse = self.description.fuse
        states_TF = self.part(fuse.norm)(states_TF)
        if fuse.tap_norms is not None:
            norms = self.part(fuse.tap_norms)
            pieces = states_TF.chunk(len(norms), dim=-1)
            states_TF = torch.cat([norm(each) for norm, each in zip(norms, pieces, strict=True)], dim=-1)
        return states_TF if fuse.first_copy is None else 2 * states_TF[..., : fuse.first_copy]

    @final
    def fuse(self, states_TF: Tensor) -> Tensor:
        """Features g, [..., W]."""
        return self.part(self.description.fuse.product)(self.normed_states(states_TF))

    @final
    def enter(self, g_TW: Tensor, e_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the first layer's attention for pairs, and the beginning of the residual stream, [..., W].

        Args:
            g_TW, e_TW: features, and embeddings of the tokens after them.
        """
        entry = self.description.entry
        if isinstance(entry, Stacked):
            normed_TW = self.part(entry.feature_norm)(g_TW)
            read = torch.cat([self.part(entry.token_norm)(e_TW), normed_TW], dim=-1)
            return read, normed_TW if entry.normed_residual else g_TW
        if isinstance(entry, Gated):
            h1_TW = self.part(entry.feature)(g_TW)
            h2_TW = F.silu(self.part(entry.token)(self.part(entry.token_norm)(e_TW)))
            x_TW = gated(h1_TW, h2_TW, self.part(entry.gate)(torch.cat([h1_TW, h2_TW], dim=-1)))
        else:
            sides = [self.part(entry.token_norm)(e_TW), self.part(entry.feature_norm)(g_TW)]
            x_TW = self.part(entry.product)(torch.cat(sides, dim=-1))
        first_norm = "layers.0.input_layernorm" if self.description.layers.first_norm else None
        return self.part(first_norm)(x_TW), x_TW

    @final
    def decode(self, g_TW: Tensor, e_TW: Tensor, positions_T: Tensor, plan: Plan, rows: Tensor | None = None) -> Tensor:
        """The last layer's output h, [T, W], or [N, W] of ``rows``.

        Args:
            plan: answers the attention of every layer.
            rows: which rows the last layer is computed for; all are read by its attention, which ``plan`` knows.
        """
        layers = self.description.layers
        read, x_TW = self.enter(g_TW, e_TW)
        if layers.library is not None:
            positions_1T, x_1TW = positions_T[None], x_TW[None]
            with following(plan):
                h_1TW: Tensor = self.part(layers.library)(
                    x_1TW, position_ids=positions_1T, position_embeddings=self.part("rotary")(x_1TW, positions_1T)
                )
            return h_1TW[0] if rows is None else h_1TW[0, rows]
        assert isinstance(self, StateNetwork)  # layers of our own, see block.py
        cos_Td, sin_Td = self.rotary_at(positions_T)
        for number in range(layers.count):
            block = self.layer(number)
            if number:
                read = block.input_layernorm(x_TW)
            q, k, v = block.project(read, cos_Td, sin_Td)
            if rows is not None and number == layers.count - 1:
                q, x_TW = q[:, rows], x_TW[rows]
            attended = plan.attend(number, q, k, v, scaling=block.scaling, window=block.window)
            x_TW = block.close(x_TW, attended.flatten(1))
        return x_TW

    @final
    def read_out(self, h_TW: Tensor) -> Tensor:
        """Input of the LM head, [..., W]."""
        return self.part(self.description.lm_head.norm)(h_TW)

    @final
    def recycled(self, h_TW: Tensor) -> Tensor:
        """The feature that replaces the target's at the next position."""
        return self.read_out(h_TW) if self.description.recycle.normed else h_TW


class LayeredNetwork(StateNetwork, PairNetwork):
    """A network over pairs with layers of ours; a subclass makes the modules that its description names."""

    @property
    def num_layers(self) -> int:
        return self.description.layers.count

    @property
    def has_own_rows(self) -> bool:
        return self.lm_head is not None

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Begin training where the deepest state is handed on nearly as it is, and normed as the target norms it.

        Embeddings that are mixed with it count as if they had a standard deviation of 1: they are often much smaller
        than states, and a quiet input is learnt late. A gate begins at one half, so half of its feature side enters.
        """
        width, entry = self.config.width, self.description.entry
        if self.config.target_width != width:
            return
        if isinstance(entry, Gated):
            weight_WW = self.part(entry.feature).weight
            weight_WW.mul_(0.3)
            weight_WW += 2 * torch.eye(width, device=weight_WW.device)
            self.part(entry.gate).weight.mul_(0.1)
            return
        weight = self.part(entry.product if isinstance(entry, Concatenated) else self.description.fuse.product).weight
        weight.mul_(0.3)
        weight[:, -width:] += torch.eye(width, device=weight.device)
        if isinstance(entry, Concatenated):
            weight[:, :width] /= self.embedding_of(model).float().std().clamp(1e-3, 1.0)
        gain_D = anatomy.gain_of(anatomy.find(model).final_norm)
        normed = self.description.taps.final  # then the state was normed already
        if not normed and self.norm is not None and gain_D is not None and gain_D.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain_D)


def gated(h1_TW: Tensor, h2_TW: Tensor, z_TW: Tensor) -> Tensor:
    """s h1 + (1 - s) h2 with s = sigmoid(z)."""
    s_TW = z_TW.sigmoid()
    return s_TW * h1_TW + (1 - s_TW) * h2_TW


def _unchanged(x: Tensor) -> Tensor:
    return x
