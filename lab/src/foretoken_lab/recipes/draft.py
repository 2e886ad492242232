"""``draft``: a Llama of 2 layers and width 192, 6.5 times cheaper a token than ``base``, distilled on its own words.

Three quarters of what it reads are the target's continuations of openings, half of them greedy, half drawn; the loss is
KL(target || draft) at every position. The openings are those of base's mixture, with more questions among them: a draft
is asked to follow answers, and it does not matter to it whether they are right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerBase

from foretoken.core.errors import ConfigError, nearest
from foretoken.models.load import load_config
from foretoken.train import sources as s
from foretoken.train.mixture import Source
from foretoken.train.objectives import DISTANCES, Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, copy_all
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab.recipes.base import mixture as base_mixture
from foretoken_lab.recipes.base import special_ids

_QUESTIONS = {"gsm8k": 0.24, "math": 0.08, "sgd_dialogues": 0.30, "topical_chat": 0.20}


def _config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **special_ids(tokenizer),
    )


def mixture(root: Path) -> list[Source]:
    """Base's mixture with more questions."""
    sources = [replace(source, share=_QUESTIONS.get(source.name, source.share)) for source in base_mixture(root)]
    return [*sources, s.corpus("webquestions", 0.06, root), s.corpus("efficientqa", 0.06, root)]


RECIPE = Recipe(
    name="draft",
    description="draft of base: Llama layout, 2 layers, width 192, 2.4 M parameters, distilled on base's own words",
    config=_config,
    sources=mixture,
    schedule=Schedule(batch=16, micro_batch=8, rates=Rates(muon=3e-3, adamw=2e-3, decay=0.6)),
    bounds=Bounds(minutes=60),
    adopt=copy_all,
    teacher="zoo:base",
    objective=lambda tokenizer, teacher: Distil(teacher, "kl"),
    own_words=0.75,
)


def distil(target: str, start: str | None, loss: str, own_words: float, on_policy: float) -> Recipe:
    """The recipe with another target, another draft to start from, or another loss.

    Args:
        target: zoo name, folder or hub id; its tokenizer is the draft's.
        start: a draft whose architecture and weights are taken; None: a new one of this recipe's shape.
        loss: one of ``DISTANCES``.
        own_words: share of the text that the target writes.
        on_policy: share that the draft in training writes.
    Raises:
        ConfigError: unknown loss, or shares out of range.
    """
    if loss not in DISTANCES:
        raise ConfigError(f"--loss {loss}: {nearest(loss, DISTANCES)}")
    for option, share in (("--own-words", own_words), ("--on-policy", on_policy)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{option} {share}: a share must be from 0 to 1")
    if own_words + on_policy > 1:
        raise ConfigError(f"--own-words {own_words} and --on-policy {on_policy} add up to more than 1")
    return replace(
        RECIPE,
        description=f"draft of {target}, distance {loss}",
        config=(lambda tokenizer: load_config(start)) if start else partial(_config_for, target),
        teacher=target,
        tokenizer=target,
        start=start,
        own_words=own_words,
        on_policy=on_policy,
        objective=lambda tokenizer, teacher: Distil(teacher, loss),
    )


def _config_for(target: str, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    config = _config(tokenizer)
    config.vocab_size = load_config(target).get_text_config().vocab_size  # may have more entries than its tokenizer
    return config
