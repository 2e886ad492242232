"""A byte-level BPE tokenizer with the zoo's special tokens and chat template."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import InputError
from foretoken.train.mixture import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SAMPLE_CHARACTERS = 20_000_000


def train_tokenizer(sources: Sequence[Source], size: int, sample: int = SAMPLE_CHARACTERS) -> PreTrainedTokenizerBase:
    """Learn a vocabulary from a mixture; digits stay single, so that arithmetic sees every digit.

    Args:
        sources: sampled in their shares.
        size: entries, special tokens included.
        sample: characters to learn from.
    Raises:
        InputError: the sources hold no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = _sample(sources, sample)
    if not any(any(documents) for documents in texts):
        raise InputError("the corpora hold no text to learn a tokenizer from")
    tokenizer.train_from_iterator(itertools.chain.from_iterable(texts), trainer)
    return wrap(tokenizer)


def wrap(tokenizer: Any) -> PreTrainedTokenizerBase:
    """A ``tokenizers`` tokenizer as one of transformers, with the special tokens and the chat template."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        mask_token=SPECIAL[6],
        extra_special_tokens=list(SPECIAL[3:6]),
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _sample(sources: Sequence[Source], characters: int) -> list[list[str]]:
    total = sum(source.share for source in sources)
    texts = []
    for source in sources:
        room = characters * source.share / total
        taken: list[str] = []
        for document in source.documents():
            for marker in SPECIAL:
                document = document.replace(marker, "")
            taken.append(document[: int(room)])
            room -= len(document)
            if room <= 0:
                break
        texts.append(taken)
    return texts
