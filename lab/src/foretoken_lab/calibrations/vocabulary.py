"""Which tokens a drafter should keep: those that are written most, counted on text (VocabTrim).

    documents ─┬─ raw      the replies of the corpus itself
               ├─ drafter  what the draft model writes to its prompts
               └─ target   what the target writes: drafts imitate it, so the best of the three
    four in five ── count ── the K most frequent, and the forced ones
    one in five  ── coverage: the share of written tokens that could have been drafted

Letters: V vocabulary, T tokens of a text.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, InputError
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken.train.outputs import LONGEST_OPENING, opening
from foretoken.train.rendering import beginning, encoder
from foretoken.train.replies import Replies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.models.language_model import LanguageModel

HELD_OUT = 5  # one text in so many is kept for the coverage
ENOUGH = 0.95  # of the held-out tokens
_BATCH = 32  # texts that are tokenised or continued at a time
_FORCED_TEXTS = ("\n", *"0123456789")


@dataclass(frozen=True, slots=True)
class Written:
    """One text: its tokens, and which of them belong to replies, the text that drafts are for.

    Attributes:
        tokens: prompt and replies.
        counts: for each token, whether it is of a reply.
    """

    tokens: Sequence[int]
    counts: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice of tokens and how much it covers.

    Attributes:
        ids: increasing.
        num_tokens, num_held_out: tokens that were counted, and on which the coverage was measured.
        coverage: share of the held-out tokens that are kept; None where nothing was held out.
        with_context: the same where tokens that stood before in their own text can be drafted, too.
    """

    ids: list[int]
    num_tokens: int
    num_held_out: int
    coverage: float | None
    with_context: float | None


def in_turn(sources: Sequence[Iterable[str]]) -> Iterator[str]:
    """One document of each source after the other, so that few tokens are of all of them."""
    readers = [iter(each) for each in sources]
    while readers:
        for reader in list(readers):
            document = next(reader, None)
            if document is None:
                readers.remove(reader)
            else:
                yield document


def raw(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Written]:
    """The replies of documents as they stand; of a text without turns, all of it."""
    encode, replies = encoder(tokenizer), Replies(tokenizer)
    for batch in _batches(documents):
        for tokens in encode(batch):
            if tokens:
                used_T = replies.used(torch.tensor([tokens]))[0]
                yield Written(tokens, [False, *used_T[:-1].tolist()])


def generated(documents: Iterable[str], llm: LLM, *, length: int, temperature: float, seed: int) -> Iterator[Written]:
    """What a model writes after openings of documents: the answer to a question, or the next words of a text.

    Args:
        llm: plain decoding is as good as any recipe.
        length: tokens of a continuation at most.
    """
    rng = random.Random(f"vocabulary {seed}")
    openings = (beginning(opening(each, rng), llm.tokenizer) for each in documents)
    number = 0  # of a text: under one seed all texts would get the same noise at the same place, so the same tokens
    for batch in _batches(openings):
        encoded = llm.tokenizer(batch, add_special_tokens=False)["input_ids"]
        prompts = [{"prompt_token_ids": tokens[-LONGEST_OPENING:]} for tokens in encoded if tokens]
        params = [
            SamplingParams(max_tokens=length, temperature=temperature, seed=(seed + each) % 2**63)
            for each in range(number, number + len(prompts))
        ]
        number += len(prompts)
        for output in llm.generate(prompts, params) if prompts else ():
            prompt = output.prompt_token_ids
            yield Written([*prompt, *output.token_ids], [False] * len(prompt) + [True] * len(output.token_ids))


def forced(model: LanguageModel) -> set[int]:
    """Tokens that are kept whatever was counted: what ends a text or a turn, other markers, digits, the line break."""
    texts = {
        tokens[0]
        for text in _FORCED_TEXTS
        if len(tokens := model.tokenizer(text, add_special_tokens=False)["input_ids"]) == 1
    }
    return {token for token in model.special_ids | texts if token < model.vocab_size}


def choose(
    texts: Iterable[Written], size: int, vocab_size: int, forced_ids: set[int], *, tokens: int, context_rows: int
) -> Chosen:
    """The ``size`` most frequent tokens, of equals those with smaller ids, and the forced ones.

    Paper:   VocabTrim, arXiv:2506.22694: TopK of the counts. Forced tokens, and the coverage on other texts, are ours.

    Args:
        tokens: count so many at most, held-out ones apart.
        context_rows: of a request, see drafting/draft_columns.py.
    Raises:
        ConfigError: more tokens than there are.
        InputError: nothing was counted.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"--size {size}: must be from 1 to the {vocab_size} tokens of the model")
    count_V = torch.zeros(vocab_size, dtype=torch.int64)
    held_out: list[Written] = []
    for number, text in enumerate(texts):
        if number % HELD_OUT == HELD_OUT - 1:
            held_out.append(text)
            continue
        written = [token for token, counts in zip(text.tokens, text.counts, strict=True) if counts]
        count_V += torch.bincount(torch.tensor(written, dtype=torch.int64), minlength=vocab_size)
        if int(count_V.sum()) >= tokens:
            break
    if not int(count_V.sum()):
        raise InputError("--corpus: there is no reply and no text in it to count tokens of")
    order = count_V.sort(descending=True, stable=True).indices
    ids = sorted({*order[:size].tolist(), *forced_ids})
    kept_V = torch.zeros(vocab_size, dtype=torch.bool)
    kept_V[ids] = True
    total, inside, known = _coverage(held_out, kept_V, context_rows)
    return Chosen(ids, int(count_V.sum()), total, inside / total if total else None, known / total if total else None)


def _coverage(held_out: Iterable[Written], kept_V: Tensor, context_rows: int) -> tuple[int, int, int]:
    """Written tokens; those that are kept; those that are kept or stood before in their text."""
    total = inside = known = 0
    kept: list[bool] = kept_V.tolist()
    for text in held_out:
        context: set[int] = set()
        for token, counts in zip(text.tokens, text.counts, strict=True):
            if counts:
                total += 1
                inside += kept[token]
                known += kept[token] or token in context
            if not kept[token] and len(context) < context_rows:
                context.add(token)
    return total, inside, known


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    while batch := list(itertools.islice(left, _BATCH)):
        yield batch
