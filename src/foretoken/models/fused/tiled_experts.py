"""The library's module of routed experts over weights that the fused decoder has packed: its layers keep working.

Letters: R rows, D width, k experts of a row, E experts, F channels of one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.fused.packing import TiledLinear, TiledPair, Tiles


class TiledExperts(nn.Module):
    """Routed experts, called as the library calls its own.

    Args:
        own: the module that this stands for; it is given back by :meth:`unpacked`, and has no weights until then.
        gate_up, down: of all experts, packed one behind the other; the gate's tiles and the other factor's in turn.
        library: compiled decoder.c.
    """

    def __init__(self, own: Any, gate_up: Tiles, down: Tiles, library: ctypes.CDLL) -> None:
        super().__init__()
        self._own = (own,)  # not registered
        self._gate_up, self._down, self._library = gate_up, down, library
        self.num_experts, twice, self.width = own.gate_up_proj.shape
        self.channels = twice // 2
        self.act_fn = own.act_fn
        own.gate_up_proj = own.down_proj = None

    def linears(self, expert: int) -> tuple[TiledPair, TiledLinear]:
        """One expert's projections: [..., D] to the gate and the other factor [..., 2 F], and [..., F] to [..., D]."""
        both, down = (
            packed[expert * tiles : (expert + 1) * tiles]
            for packed, tiles in ((self._gate_up, self.channels // 8), (self._down, self.width // 16))
        )
        gate, up = (TiledLinear(each, self.channels, None, self._library) for each in (both[0::2], both[1::2]))
        return TiledPair(gate, up), TiledLinear(down, self.width, None, self._library)

    @property
    def gate_up_proj(self) -> Tensor:
        """A copy in the usual order, [E, 2 F, D]."""
        return torch.stack([self.linears(expert)[0].weight for expert in range(self.num_experts)])

    @property
    def down_proj(self) -> Tensor:
        """A copy in the usual order, [E, D, F]."""
        return torch.stack([self.linears(expert)[1].weight for expert in range(self.num_experts)])

    def unpacked(self) -> Any:
        """The module that there was, with the same weights bit for bit."""
        (own,) = self._own
        for name in ("gate_up_proj", "down_proj"):
            setattr(own, name, nn.Parameter(getattr(self, name), requires_grad=False))
        return own

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[R, D], chosen experts [R, k] and their weights [R, k] -> [R, D]"""
        sum_RD = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            gate_up, down = self.linears(expert)
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            gate_nF, up_nF = gate_up(hidden_states[rows]).chunk(2, dim=-1)
            y_nD = down(self.act_fn(gate_nF) * up_nF)
            sum_RD.index_add_(0, rows, y_nD.float() * top_k_weights[rows, places, None].float())
        return sum_RD.to(hidden_states.dtype)
