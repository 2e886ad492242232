"""``base-ee``: ``base`` made twice as deep, and taught to be left early (LayerSkip; Elhoushi et al., 2024).

After each of base's eight layers stands a new one that at first adds nothing (its two output projections are zero), so
training starts from base's own distribution with sixteen layers to share the work among. Exits on eight thick layers
save
little: the head alone costs as much as two of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerBase

from foretoken.forward import anatomy
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import base
from foretoken_lab.recipes.early_exits import EarlyExits

GROWTH = 2


def _config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    config = base.RECIPE.config(tokenizer)
    config.num_hidden_layers *= GROWTH
    return config


@torch.no_grad()
def deepen(model: nn.Module, start: nn.Module) -> None:
    """Put the layers of ``start`` into every second place of a model twice as deep; it then computes the same."""
    ours, theirs = anatomy.find(model), anatomy.find(start)
    ours.embedding.load_state_dict(theirs.embedding.state_dict())
    ours.final_norm.load_state_dict(theirs.final_norm.state_dict())
    ours.head.load_state_dict(theirs.head.state_dict())
    layer: Any
    for number, layer in enumerate(ours.layers):
        source, added = divmod(number, GROWTH)
        if added:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        else:
            layer.load_state_dict(theirs.layers[source].state_dict())


RECIPE = Recipe(
    name="base-ee",
    description="base twice as deep, for early exits: Llama layout, 16 layers, width 384, 28.3 M parameters",
    config=_config,
    sources=base.mixture,
    schedule=Schedule(batch=16, micro_batch=4, rates=Rates(muon=2e-3, adamw=1e-3, decay=0.6)),
    bounds=Bounds(minutes=90),
    start="zoo:base",
    adopt=deepen,
    objective=lambda tokenizer, teacher: EarlyExits(),
)
