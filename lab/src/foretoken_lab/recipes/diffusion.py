"""``diffusion``: a masked-diffusion language model, bidirectional: fills a run of masks after a prefix in one pass."""

from __future__ import annotations

from transformers import ModernBertConfig, PreTrainedTokenizerBase

from foretoken.core.errors import ModelError
from foretoken.train.distil import special_ids
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import base
from foretoken_lab.recipes.objectives import MaskedDiffusion


def _config(tokenizer: PreTrainedTokenizerBase) -> ModernBertConfig:
    ids = special_ids(tokenizer)
    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        global_attn_every_n_layers=1,  # every layer sees everything
        max_position_embeddings=4096,
        mask_token_id=tokenizer.mask_token_id,
        cls_token_id=ids["bos_token_id"],
        sep_token_id=tokenizer.eos_token_id,
        **ids,
    )


def _objective(tokenizer: PreTrainedTokenizerBase, teacher: None) -> MaskedDiffusion:
    if tokenizer.mask_token_id is None:
        raise ModelError("the tokenizer has no mask token: a masked-diffusion model needs one")
    return MaskedDiffusion(int(tokenizer.mask_token_id))


RECIPE = Recipe(
    name="diffusion",
    description="masked diffusion: ModernBERT layout, 4 layers, width 192, bidirectional, fills up to 32 masks at once",
    config=_config,
    sources=base.mixture,
    block=192,
    schedule=Schedule(batch=64, micro_batch=32, rates=Rates(muon=3e-3, adamw=3e-3)),
    bounds=Bounds(minutes=60),
    objective=_objective,
)
