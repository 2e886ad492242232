"""The library's module of routed experts over weights that the native decoder has packed: its layers keep working."""

import ctypes
from typing import Any

import torch
from torch import nn

from foretoken.forward.quantised_experts import ByExpert, ClampedGate, QuantisedExperts, in_turn
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.native.packing import TiledLinear, TiledPair, Tiles


class TiledExperts(ByExpert):
    """Routed experts, called as the library calls its own.

    Args:
        own: the module that this stands for; it is given back by :meth:`unpacked`, and has no weights until then.
        gate_up, down: of all experts, packed one after the other; the gate's tiles and the other factor's in turn.
        library: compiled decoder.c.
    """

    def __init__(self, own: Any, gate_up: Tiles, down: Tiles, library: ctypes.CDLL) -> None:
        super().__init__()
        self._own = (own,)  # not registered
        self._gate_up, self._down, self._library = gate_up, down, library
        self._turned = not hasattr(own, "act_fn")  # GPT-OSS's
        self.gated = not hasattr(own, "up_proj")
        self.act_fn = ClampedGate(own.alpha, own.limit) if self._turned else own.act_fn
        if isinstance(own, QuantisedExperts):
            self.num_experts, self.width, self.channels = own.num_experts, own.width, own.channels
            self.biases = own.biases
            own.weights = []
            return
        self.num_experts, self.width, self.channels = own.down_proj.shape
        if self._turned:
            self.width, self.channels = self.channels, self.width
            both = own.gate_up_proj_bias.detach()
            self.biases = torch.cat([both[:, ::2], both[:, 1::2]], dim=1), own.down_proj_bias.detach()
        for name in self._names:
            setattr(own, name, None)

    @property
    def _names(self) -> tuple[str, str]:
        return ("gate_up_proj" if self.gated else "up_proj", "down_proj")

    def linears(self, expert: int) -> tuple[TiledPair | TiledLinear, TiledLinear]:
        """One expert's projections: [..., D] to the gate and the other factor [..., 2 F], and [..., F] to [..., D]."""
        both, down = (
            packed[expert * tiles : (expert + 1) * tiles]
            for packed, tiles in (
                (self._gate_up, self.channels // (8 if self.gated else 16)),
                (self._down, self.width // 16),
            )
        )
        out = TiledLinear(down, self.width, None, self._library)
        if not self.gated:
            return TiledLinear(both, self.channels, None, self._library), out
        gate, up = (TiledLinear(each, self.channels, None, self._library) for each in (both[0::2], both[1::2]))
        return TiledPair(gate, up), out

    def unpacked(self) -> Any:
        """The module that there was, with the same weights bit for bit."""
        (own,) = self._own
        if isinstance(own, QuantisedExperts):
            pairs = []
            for expert in range(self.num_experts):
                gate_up, down = (each.unpacked() for each in self.linears(expert))
                assert isinstance(gate_up, QuantisedLinear)
                assert isinstance(down, QuantisedLinear)
                pairs.append((gate_up.quantised, down.quantised))
            return QuantisedExperts(pairs, self.act_fn, self.biases)
        weights = self.gate_up_proj, self.down_proj
        for name, weight in zip(self._names, in_turn(*weights) if self._turned else weights, strict=True):
            setattr(own, name, nn.Parameter(weight, requires_grad=False))
        return own
