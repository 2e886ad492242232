"""``long``: ``base`` continued to 16,384 positions, on text in which far context matters.

Rotary positions are scaled by YaRN (Peng et al., 2024) from the 512 that ``base`` saw, and the blocks skip positions
(PoSE), so distances up to the longest are learnt on blocks of 1,024 tokens. Half of the mixture hides keys in
pages of books and asks for them, some of it asks for sentences of the pages again; the rest keeps what ``base`` can do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerBase

from foretoken.train import sources as s
from foretoken.train.mixture import Source
from foretoken.train.objectives import SkippedPositions
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, copy_all
from foretoken.train.recipes import base
from foretoken.train.trainer import Bounds, Schedule

LONGEST = 16_384


def _config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    config = base.RECIPE.config(tokenizer)
    config.max_position_embeddings = LONGEST
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": LONGEST / 512,
        "original_max_position_embeddings": 512,
    }
    return config


def _mixture(root: Path) -> list[Source]:
    return [
        s.hidden_keys(0.50, root),
        s.recall(0.10, root),
        s.corpus("qmsum", 0.05, root),
        *(replace(source, share=source.share * 0.35) for source in base.mixture(root)),
    ]


RECIPE = Recipe(
    name="long",
    description="base continued to 16,384 positions (YaRN), with keys and sentences to find far back",
    config=_config,
    sources=_mixture,
    block=1024,
    schedule=Schedule(batch=8, micro_batch=4, rates=Rates(muon=2e-3, adamw=1e-3)),
    bounds=Bounds(minutes=60),
    start="zoo:base",
    adopt=copy_all,
    objective=lambda tokenizer, teacher: SkippedPositions(LONGEST),
)
