"""``moe``: ``base`` with four experts for every MLP, of which two compute a token, in the Mixtral layout.

Each MLP is cut into two halves of its channels; experts 0 and 2 begin as one half, 1 and 3 as the other (sparse
upcycling, Komatsuzaki et al., 2022, with halves in place of copies: a token costs as much as before). The routers' rows
begin as opposites, row 2 as minus row 0 and row 3 as minus row 1, so that one of each pair is among the first two
whatever a token is: the model begins as ``base`` up to the routers' small weights, and every expert gets half of the
tokens. Distilled from ``base``.

The published weights began as ``base-tasks-2``, the stage of ``base`` before the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, PreTrainedTokenizerBase

from foretoken.forward import anatomy
from foretoken.train.objectives import Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import base, hybrid

_ROUTED = 0.005  # the routers' first weights: small, so that both experts of a token weigh nearly a half


def _config(tokenizer: PreTrainedTokenizerBase) -> MixtralConfig:
    shape = base.shape(tokenizer)
    shape["intermediate_size"] //= 2
    return MixtralConfig(
        **shape, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.01, sliding_window=None
    )


@torch.no_grad()
def adopt(model: nn.Module, start: nn.Module) -> None:
    """Take a transformer's weights, those of its MLPs into experts."""
    ours, theirs = anatomy.find(model), anatomy.find(start)
    ours.embedding.load_state_dict(theirs.embedding.state_dict())
    ours.final_norm.load_state_dict(theirs.final_norm.state_dict())
    layer: Any
    source: Any
    for layer, source in zip(ours.layers, theirs.layers, strict=True):
        for part in ("input_layernorm", "post_attention_layernorm", "self_attn"):
            getattr(layer, part).load_state_dict(getattr(source, part).state_dict())
        _into_experts(layer.mlp, source.mlp)


def _into_experts(block: Any, mlp: Any) -> None:
    """An MLP's halves as experts 0 and 1, and again as 2 and 3; a token's two weigh a half each."""
    halves = zip(
        mlp.gate_proj.weight.chunk(2), mlp.up_proj.weight.chunk(2), mlp.down_proj.weight.chunk(2, 1), strict=True
    )
    for half, (gate, up, down) in enumerate(halves):
        for expert in (half, half + 2):
            block.experts.gate_up_proj[expert] = torch.cat([gate, up])
            block.experts.down_proj[expert] = 2 * down
    first = block.gate.weight[:2].normal_(std=_ROUTED)
    block.gate.weight[2:] = -first


def balanced(model: nn.Module) -> Callable[[], None]:
    """Have the model compute its load-balancing loss while it trains."""
    config: Any = model.config
    config.output_router_logits = True

    def undo() -> None:
        config.output_router_logits = False

    return undo


RECIPE = Recipe(
    name="moe",
    description="experts: base in the Mixtral layout, 8 layers, width 384, 4 experts, of which 2 a token",
    config=_config,
    sources=hybrid.mixture,
    schedule=Schedule(batch=16, micro_batch=4, rates=Rates(muon=1e-3, adamw=5e-4, decay=0.6)),
    bounds=Bounds(minutes=30),
    start="zoo:base",
    adopt=adopt,
    teacher="zoo:base",
    objective=lambda tokenizer, teacher: Distil(teacher, "kl", next_token=0.2),
    prepare=balanced,
)
