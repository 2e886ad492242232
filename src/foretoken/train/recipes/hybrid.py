"""``hybrid``: Mamba-2 and attention layers by turns in the Bamba layout, distilled from ``base``."""

from __future__ import annotations

from transformers import BambaConfig, PreTrainedTokenizerBase

from foretoken.train.objectives import Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.recipes.base import mixture, special_ids
from foretoken.train.ssd import CHUNK, faster_scan, initialise
from foretoken.train.trainer import Bounds, Schedule


def _config(tokenizer: PreTrainedTokenizerBase) -> BambaConfig:
    return BambaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        attn_layer_indices=[1, 3],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=CHUNK,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **special_ids(tokenizer),
    )


RECIPE = Recipe(
    name="hybrid",
    description="hybrid: Bamba layout, 2 Mamba-2 and 2 attention layers by turns, width 256",
    config=_config,
    sources=mixture,
    schedule=Schedule(batch=16, micro_batch=4, rates=Rates(muon=3e-3, adamw=3e-3)),
    bounds=Bounds(minutes=60),
    teacher="zoo:base",
    objective=lambda tokenizer, teacher: Distil(teacher, "kl", next_token=0.2),
    initialise=initialise,
    prepare=faster_scan,
)
