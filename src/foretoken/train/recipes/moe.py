"""``moe``: a mixture of 8 experts, of which 2 compute a token, in the Qwen3-MoE layout, distilled from ``base``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig

from foretoken.train.objectives import Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.recipes.base import mixture, special_ids
from foretoken.train.trainer import Bounds, Schedule


def _config(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **special_ids(tokenizer),
    )


def balanced(model: nn.Module) -> Callable[[], None]:
    """Have the model compute its load-balancing loss while it trains."""
    config: Any = model.config
    config.output_router_logits = True

    def undo() -> None:
        config.output_router_logits = False

    return undo


RECIPE = Recipe(
    name="moe",
    description="mixture of experts: Qwen3-MoE layout, 6 layers, width 256, 8 experts of which 2 compute a token",
    config=_config,
    sources=mixture,
    schedule=Schedule(batch=16, micro_batch=8, rates=Rates(muon=3e-3, adamw=3e-3)),
    bounds=Bounds(minutes=60),
    teacher="zoo:base",
    objective=lambda tokenizer, teacher: Distil(teacher, "kl", next_token=0.2),
    prepare=balanced,
)
