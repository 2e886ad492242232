"""``mamba``: a pure Mamba-2 model of 4 layers, distilled from ``base``. Its state never grows."""

from __future__ import annotations

from transformers import Mamba2Config, PreTrainedTokenizerBase

from foretoken.train.objectives import Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.recipes.base import mixture, special_ids
from foretoken.train.ssd import CHUNK, faster_scan, initialise
from foretoken.train.trainer import Bounds, Schedule


def _config(tokenizer: PreTrainedTokenizerBase) -> Mamba2Config:
    return Mamba2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        state_size=64,
        expand=2,
        head_dim=64,
        num_heads=8,
        n_groups=1,
        conv_kernel=4,
        chunk_size=CHUNK,
        use_bias=False,
        use_conv_bias=True,
        residual_in_fp32=True,
        tie_word_embeddings=True,
        **special_ids(tokenizer),
    )


RECIPE = Recipe(
    name="mamba",
    description="state space: pure Mamba-2, 4 layers, width 256, 64 states a channel",
    config=_config,
    sources=mixture,
    schedule=Schedule(batch=16, micro_batch=4, rates=Rates(muon=3e-3, adamw=3e-3)),
    bounds=Bounds(minutes=60),
    teacher="zoo:base",
    objective=lambda tokenizer, teacher: Distil(teacher, "kl", next_token=0.2),
    initialise=initialise,
    prepare=faster_scan,
)
