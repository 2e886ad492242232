"""Training for early exits, after LayerSkip (Elhoushi et al., 2024, section 4): layer dropout and an exit loss.

    layers[0] ─ layers[1] ─ … ─ layers[L-1] ─ norm ─ head ── next-token loss
         └ norm ─ head ── distance to the last layer's distribution, at a few exits of each micro-batch

The final norm and the head are shared by all exits, so a drafter needs no weights of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.forward import anatomy
from foretoken.forward.hidden_states import watching
from foretoken.forward.span import passed_by
from foretoken.train.objectives import distance


class EarlyExits:
    """Next-token loss of the last layer, and at a few earlier depths the distance to the last layer's distribution.

    Differs from the paper: exits learn KL(last layer || exit), not the data's next token, because what a drafter is
    accepted by is the last layer; they are chosen in rotation at random offsets, all of equal weight, where the paper
    lets the weight grow with depth; a layer is dropped for a micro-batch, not for one sequence, which saves its time.

    Args:
        dropout: probability that the last layer is dropped; earlier ones by (2^(l/(L-1)) - 1) of it (paper, eq. 2).
        exits: share of the loss that the exits have.
        rotation: one exit in so many is computed (the paper's rotational curriculum).
    """

    name = "early_exits"

    def __init__(self, dropout: float = 0.1, exits: float = 0.5, rotation: int = 5) -> None:
        self._dropout, self._exits, self._rotation = dropout, exits, rotation

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        parts = anatomy.find(model)
        depth = len(parts.layers)
        draw = torch.rand(depth + 1, generator=generator)
        share_L = torch.tensor([2 ** (layer / (depth - 1)) - 1 for layer in range(depth)])
        dropped = (draw[:depth] < share_L * self._dropout).tolist() if model.training else [False] * depth
        offset = math.floor(float(draw[depth]) * self._rotation)
        chosen = range(1 + offset % min(self._rotation, depth - 1), depth, self._rotation)
        hidden: list[Tensor] = []
        skipped = (layer for layer, drop in zip(parts.layers, dropped, strict=True) if drop)
        with passed_by(skipped), watching(parts, chosen, lambda depth, output: hidden.append(output)):
            logits = model(input_ids=tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        final_NV = logits.detach().flatten(0, 1).float()
        apart = [distance(final_NV, parts.head(parts.final_norm(h)).flatten(0, 1).float(), "kl") for h in hidden]
        return (1 - self._exits) * loss + self._exits * torch.stack(apart).mean()
