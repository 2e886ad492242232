"""``mamba``: a pure Mamba-2 model of 4 layers. Its state never grows.

Most of its training text are questions with answers that copy names and numbers out of the question. A state has to
hold these: most answers need that, and it is learnt last. Answers count in full, questions hardly.
"""

from __future__ import annotations

from pathlib import Path

from transformers import Mamba2Config, PreTrainedTokenizerBase

from foretoken.train.distil import special_ids
from foretoken.train.mixture import Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import sources as s
from foretoken_lab.recipes.base_tasks_2 import answers_first
from foretoken_lab.recipes.ssd import CHUNK, faster_scan, initialise


def mixture(root: Path) -> list[Source]:
    """Four fifths tasks: a state of 64 values a channel learns to copy late."""
    return [
        s.task("json", 0.28),
        s.task("code", 0.24),
        s.task("arithmetic", 0.14),
        s.task("profiles", 0.06),
        s.task("keys", 0.08),
        s.corpus("stdlib_functions", 0.04, root),
        s.corpus("sgd_dialogues", 0.08, root),
        s.corpus("books", 0.08, root),
    ]


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
    objective=lambda tokenizer, teacher: answers_first(tokenizer),
    initialise=initialise,
    prepare=faster_scan,
)
