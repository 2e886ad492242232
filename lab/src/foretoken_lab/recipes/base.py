"""``base``: the dense target. A Llama of 8 layers and width 384, on reading, arithmetic, dialogue, code and books.

The generated tasks have a third of the mixture: at this size they are what a model can become good at, and a lossy
method can only be judged where there is accuracy to lose. No model-written and no non-commercial data, no SQuAD
passages, and one country in four of the factbook is left out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedTokenizerBase

from foretoken.train.distil import special_ids
from foretoken.train.mixture import Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, copy_all
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes import sources as s
from foretoken_lab.recipes.tokenizer import train_tokenizer


def shape(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a configuration says of a model of this size, in the words that all layouts share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **special_ids(tokenizer),
    }


def mixture(root: Path) -> list[Source]:
    """The mixture of the zoo; the other models share it."""
    return [
        s.task("arithmetic", 0.16),
        s.task("profiles", 0.11),
        s.task("keys", 0.04),
        s.task("json", 0.04),
        s.task("code", 0.04),
        s.factbook(0.05, root),
        s.cloze("wikitext2", 0.04, root),
        s.corpus("gsm8k", 0.10, root),
        s.corpus("math", 0.05, root),
        s.corpus("mbpp", 0.01, root),
        s.corpus("stdlib_functions", 0.06, root),
        s.corpus("stdlib", 0.03, root),
        s.corpus("sgd_dialogues", 0.08, root),
        s.corpus("topical_chat", 0.05, root),
        s.corpus("openstax", 0.02, root),
        s.corpus("books", 0.12, root),
    ]


RECIPE = Recipe(
    name="base",
    description="dense target: Llama layout, 8 layers, width 384, 15.7 M parameters",
    config=lambda tokenizer: LlamaConfig(**shape(tokenizer)),
    sources=mixture,
    block=512,
    schedule=Schedule(batch=16, micro_batch=8, rates=Rates(muon=2e-3, adamw=2e-3, decay=0.6)),
    bounds=Bounds(minutes=120),
    tokenizer=partial(train_tokenizer, size=8192),
    adopt=copy_all,
)
