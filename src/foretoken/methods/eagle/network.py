"""EAGLE's draft network: a decoder layer over pairs of a feature of the target and the token after it.

    pair i      feature g_i of row i  ─┐
                token x_{i+1}         ─┴─ layer ── a_i ── LM head ── q of x_{i+2}
    drafting    a_i replaces g_{i+1}, which the target has not computed yet

Papers: EAGLE-3, arXiv:2503.01840, section 3.1 and figure 5; EAGLE-2, arXiv:2406.16858, has the network of
EAGLE-1, arXiv:2401.15077, section 3.1 and figure 6. Differs: the depths of our networks are proportional to
(2, L/2, L-3) of 32 layers; a network without ``lm_head`` uses K rows of the target's own LM head.

Letters: S rows of the target, T pairs, F width of the fused states, W width, V vocabulary.
"""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.drafting.feature_heads.block import Block, Norm
from foretoken.drafting.feature_heads.description import (
    Concatenated,
    Fuse,
    Layers,
    LmHead,
    Masks,
    NetworkDescription,
    Recycle,
    Stacked,
)
from foretoken.drafting.feature_heads.pair_network import LayeredNetwork
from foretoken.drafting.published.probe import PublishedHead, looked_up, scored, tap_readings
from foretoken.methods.eagle.config import EAGLE3, EagleConfig
from foretoken.models.language_model import LanguageModel

_Eagle = TypeVar("_Eagle", bound="EagleNetwork")


def describe(config: EagleConfig) -> NetworkDescription:
    """Describe the network as data; equal to :meth:`EagleNetwork.forward`."""
    if config.algorithm != EAGLE3:
        return NetworkDescription(
            taps=config.taps,
            entry=Concatenated("fc"),
            layers=Layers(first_norm=False),
            recycle=Recycle(normed=config.norm_output),
            lm_head=LmHead(norm=None),
        )
    layer, norms = "layers.0", ("input_norm" if config.norm_before_fc else None, "fc_norm" if config.fc_norm else None)
    return NetworkDescription(
        taps=config.taps,
        fuse=Fuse(*norms, "fc") if config.fused else Fuse(),
        layers=Layers(config.layers),
        entry=Stacked(f"{layer}.input_layernorm", f"{layer}.hidden_norm", config.norm_before_residual),
        recycle=Recycle(normed=config.norm_output),
        masks=None if config.mask_token is None else Masks(config.mask_token, "mask_hidden"),
    )


class EagleNetwork(LayeredNetwork, PublishedHead):
    """The weights of an EAGLE-2 or EAGLE-3 network.

    Args:
        config: its sizes and its algorithm.
        ids_K, own_head, own_embedding: see :class:`StateNetwork`.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.description, eagle3 = describe(config), config.algorithm == EAGLE3
        fused = config.taps.count * config.target_width
        if eagle3:
            if config.fused:
                self.fc = nn.Linear(fused, config.width, bias=False)
            if config.mask_token is not None:  # P-EAGLE, arXiv:2602.01469
                self.mask_hidden = nn.Parameter(torch.zeros(1, 1, fused))
            self.norm = Norm(config.width, eps=config.norm_eps)
            if config.norm_before_fc:
                self.input_norm = Norm(fused, eps=config.norm_eps)
            if config.fc_norm:
                norms = (Norm(config.target_width, eps=config.norm_eps) for _ in range(config.taps.count))
                self.fc_norm = nn.ModuleList(norms)
        else:
            self.fc = nn.Linear(2 * config.width, config.width, bias=config.fusion_bias)
        first = Block(config, paired=eagle3, normed=eagle3, window=config.window(0))
        others = (Block(config, window=config.window(number)) for number in range(1, config.layers))
        self.layers = nn.ModuleList([first, *others])

    def forward(self, states_SF: Tensor, tokens_T: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the inputs of the LM head, [T, W]; see :class:`PairNetwork`.

        EAGLE-3: ``states`` are l, m, h, the low, middle and high states. EAGLE-2: ``states`` are f, the last state
        after the final norm.
        """
        config, layer = self.config, self.layer(0)
        eagle3 = config.algorithm == EAGLE3
        e = F.embedding(tokens_T, embedding_VW)
        if config.mask_token is not None:  # the rows after the known ones, all at once
            num_masks = len(tokens_T) - len(states_SF)
            states_SF = torch.cat([states_SF, self.mask_hidden[0].expand(num_masks, -1)])
            mask_W = embedding_VW[config.mask_token]
            e = torch.cat([e[: len(tokens_T) - num_masks], mask_W.expand(num_masks, -1)])
        g = self._fused(states_SF) if eagle3 else states_SF
        while True:
            known, places = e[: len(g)], self.rotary_at(torch.arange(len(g)))
            if eagle3:  # attention over [e; g]; norms and start of the residual follow the released code
                normed = layer.hidden_norm(g)
                both = torch.cat([layer.input_layernorm(known), normed], dim=-1)
                a = layer(both, normed if config.norm_before_residual else g, *places)
            else:  # EAGLE-1: fc([e; f]), then a layer without its first norm
                x = self.fc(torch.cat([known, g], dim=-1))
                a = layer(x, x, *places)
            for number in range(1, config.layers):  # the paper has one layer; some checkpoints have more
                a = self.layer(number)(self.layer(number).input_layernorm(a), a, *places)
            out = a if self.norm is None else self.norm(a)
            if len(g) == len(tokens_T):
                return out
            g = torch.cat([g, (out if config.norm_output else a)[-1:]])  # the output replaces the next g, still unknown

    def with_config(self: _Eagle, config: EagleConfig) -> _Eagle:
        found = super().with_config(config)
        found.description = describe(config)
        return found

    def readings(self, target: LanguageModel) -> dict[str, tuple[Any, ...]]:
        """See :class:`PublishedHead`."""
        config = self.config
        if config.algorithm != EAGLE3:
            return {}
        normed = config.norm_before_residual
        return {**tap_readings(config, target.num_layers), "norm_before_residual": (normed, not normed)}

    def first_drafts(
        self, states_TF: Tensor, tokens_T: Tensor, embedding_VW: Tensor, head_KW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PublishedHead`: pair i drafts the token after row i + 1."""
        places, table = looked_up(tokens_T[1:], embedding_VW)
        return torch.arange(1, len(tokens_T)), scored(self(states_TF[:-1], places, table), head_KW)

    def _fused(self, states_SF: Tensor) -> Tensor:
        """g = FC([l; m; h]), section 3.1; some checkpoints have norms before it."""
        if not self.config.fused:
            return states_SF
        if self.config.norm_before_fc:
            states_SF = self.input_norm(states_SF)
        if self.config.fc_norm:
            each = states_SF.split(self.config.target_width, dim=-1)
            states_SF = torch.cat([norm(state) for norm, state in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(states_SF)

    def rates(self) -> tuple[Tensor, float]:
        scaling = self.config.rope_scaling
        return super().rates() if scaling is None else scaling.frequencies(self.config.rope_theta, self.config.head_dim)
