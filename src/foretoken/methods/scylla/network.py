"""Scylla's draft network: D decoder layers over pairs of the target's final state and the following token.

    x_i = fc([e(x_{i+1}); f_i])   ──  D layers  ──  RMSNorm  ──  rows of the target's LM head: q of x_{i+2}

Paper: "Scaling Laws for Speculative Decoding", arXiv:2505.07858 (no released code was found; the network follows
descriptions without numbered equations). Differs: all layers have both of their norms, and the recycled feature is the
output of the final norm, like the target's f; by default the MLP has a quarter of the target's channels; a network may
score a subset of tokens (``draft_vocab_size``) and stores their ids.

Letters: D layers, S rows of the target, T pairs, F width of the target's states, W width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.drafting.feature_heads.block import Block, Norm
from foretoken.drafting.feature_heads.description import Concatenated, Layers, NetworkDescription, Recycle
from foretoken.drafting.feature_heads.stack import StackConfig, StackNetwork


@dataclass(frozen=True, kw_only=True)
class ScyllaConfig(StackConfig):
    """The sizes of a network, and its target; the recycled feature is the output of the final norm."""

    norm_output: bool = True


def describe(config: ScyllaConfig) -> NetworkDescription:
    """Describe the network as data; equal to :meth:`Scylla.forward`."""
    return NetworkDescription(
        taps=config.taps,
        fuse=config.fuse,
        entry=Concatenated("fc"),
        layers=Layers(config.layers),
        recycle=Recycle(normed=config.norm_output),
    )


class Scylla(StackNetwork):
    """The weights of Scylla's draft network.

    Args:
        config: its sizes.
        shared: see :class:`StackNetwork`.
    """

    algorithm = "scylla"
    title = "Scylla head"
    Config = ScyllaConfig
    config: ScyllaConfig

    def __init__(self, config: ScyllaConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.description = describe(config)
        self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        self.layers = nn.ModuleList([Block(config, window=config.window) for _ in range(config.layers)])
        self.norm = Norm(config.width, eps=config.norm_eps)

    def forward(self, states_SF: Tensor, tokens_T: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the inputs of the LM head, [T, W]; see :class:`PairNetwork`."""
        assert self.norm is not None
        e = F.embedding(tokens_T, embedding_VW)
        f = self.original(states_SF)
        while True:
            x = self.fc(torch.cat([e[: len(f)], f], dim=-1))
            for number in range(self.config.layers):
                layer = self.layer(number)
                x = layer(layer.input_layernorm(x), x, *self.rotary_at(torch.arange(len(f))))
            out: Tensor = self.norm(x)
            if len(f) == len(tokens_T):
                return out
            f = torch.cat([f, (out if self.config.norm_output else x)[-1:]])  # the output replaces the target's f
