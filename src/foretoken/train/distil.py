"""The recipe of a draft: a Llama of 2 layers and width 192, distilled on its target's own words.

Three quarters of its training text are the target's continuations of openings, half of them greedy, half drawn; the
loss is KL(target || draft) at every position.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import LlamaConfig, PreTrainedTokenizerBase

from foretoken.core.errors import ConfigError, nearest
from foretoken.data.documents import END
from foretoken.models.load import load_config
from foretoken.train.objectives import DISTANCES, Distil
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, copy_all
from foretoken.train.sources import mixture
from foretoken.train.trainer import Bounds, Schedule


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


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a configuration says about the tokenizer; generation stops at the end of the text or of the turn."""
    ends = [tokenizer.eos_token_id, tokenizer.get_vocab().get(END)]  # a tokenizer that is not the zoo's has no END
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [end for end in ends if end is not None] or None,
    }


RECIPE = Recipe(
    name="draft",
    description="draft of base: Llama layout, 2 layers, width 192, 2.4 M parameters, distilled on base's own words",
    config=_config,
    sources=mixture("draft"),
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
        start: a draft to take architecture and weights from; None: a new one of this recipe's shape.
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
