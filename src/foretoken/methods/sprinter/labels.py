"""Examples for SPRINTER's head: draft tokens after prompts, and whether the target certainly accepts them.

    prompt ── draft reads, h_pre, q ── y ── draft reads y, h_post         facts: of y under q (network.py)
           └─ target reads, p          └── label: q(y) <= ratio p(y)
    continue with y where the label is 1, else with the target's token; ``steps`` times

Paper: arXiv:2502.04557 and its released code: the first 30 % of a document, 20 steps, the draft's greedy token, both
distributions at temperature 1; the label is the certain part of the acceptance test, not a random outcome.
Differs: 30 % of the tokens, not of the words; documents end at end tokens of the models; all features are kept; tokens
may be sampled at a temperature instead.

Letters: N examples, B prompts, D width, V vocabulary, 3 facts (network.py).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.methods.sprinter.network import FACTS, facts_of
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.last_states import LastStates
from foretoken.models.prefill import prefill
from foretoken.train.mixture import Source
from foretoken.train.outputs import opening
from foretoken.train.rendering import beginning, encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_PROMPT = 1024  # tokens
GROUP = 32  # prompts in one batch


@dataclass(frozen=True)
class Collecting:
    """Options of the collection.

    Attributes:
        count: number of examples; the last group may add a few more.
        share: part of a document that is the prompt.
        replies: draft from the beginning of replies instead.
        steps: tokens after a prompt.
        temperature: 0: the draft's greedy tokens, distributions at temperature 1; else both at this temperature.
        ratio: a token is acceptable where q <= ratio p.
        seed: of the order of documents and of the sampled tokens.
        seconds: time limit; None: none.
    """

    count: int = 10_000
    share: float = 0.3
    replies: bool = False
    steps: int = 20
    temperature: float = 0.0
    ratio: float = 1.0
    seed: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class Examples:
    """Collected examples.

    Attributes:
        pre_ND, post_ND: float32, the draft's last hidden state before and after it read the token.
        facts_N3: float32, the facts of the token under the draft's distribution.
        p_N, q_N: float32, the token's probabilities under target and draft.
        document_N: int64, number of its prompt.
    """

    pre_ND: Tensor
    post_ND: Tensor
    facts_N3: Tensor
    p_N: Tensor
    q_N: Tensor
    document_N: Tensor

    def __len__(self) -> int:
        return len(self.p_N)

    def features(self, feature: str) -> Tensor:
        """Return the input of a head with this feature: [N, D], with the facts for "drawn" [N, D + 3]."""
        if feature == "drawn":
            return torch.cat([self.pre_ND, self.facts_N3], dim=-1)
        return self.pre_ND if feature == "pre" else self.post_ND

    def labels(self, ratio: float, *, soft: bool) -> Tensor:
        """Return labels, float32 [N]: q <= ratio p; soft: the acceptance probability min(1, p/q)."""
        if soft:
            return (self.p_N / self.q_N).clamp(max=1.0)
        return (self.q_N <= self.p_N * ratio).float()


def collect(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Iterator[list[int]],
    how: Collecting,
    report: Callable[[int], None] = lambda number: None,
) -> Examples:
    """Draft after prompts until there are enough examples, the time is over, or the prompts are used up.

    Args:
        prompts: token ids, at least one each; see :func:`prompts_of`.
        report: called with the number of examples so far.
    """
    generator = torch.Generator(device=target.device).manual_seed(how.seed)
    ends = time.monotonic() + (how.seconds if how.seconds is not None else float("inf"))
    pair = _Pair(target, draft)
    pieces: list[tuple[Tensor, ...]] = []
    number = documents = 0
    while number < how.count and time.monotonic() < ends:
        # the last group has only as many prompts as needed
        wanted = min(GROUP, -(-(how.count - number) // how.steps))
        group = list(itertools.islice(prompts, wanted))
        if not group:
            break
        for piece in pair.walk(group, how, generator, ends):
            pieces.append((*piece[:-1], piece[-1] + documents))
            number += len(piece[0])
            report(number)
        documents += len(group)
    if not pieces:
        empty_D = torch.zeros(0, draft.config.get_text_config(decoder=True).hidden_size)
        nothing = torch.zeros(0)
        return Examples(empty_D, empty_D, torch.zeros(0, len(FACTS)), nothing, nothing, nothing.long())
    return Examples(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


class _Pair:
    """Target and draft, each with its own cache."""

    def __init__(self, target: LanguageModel, draft: LanguageModel) -> None:
        self._target, self._draft = target, draft
        self._caches = target.new_cache(GROUP), draft.new_cache(GROUP)
        self._last = LastStates(draft)
        self._width = min(target.vocab_size, draft.vocab_size)

    @torch.inference_mode()
    def walk(
        self, prompts: Sequence[list[int]], how: Collecting, generator: torch.Generator, ends: float
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Yield the examples of each step of a group: pre, post, facts, p, q, number of the prompt."""
        theirs, ours = self._caches
        slots = [(theirs.acquire(), ours.acquire()) for _ in prompts]
        try:
            for prompt, (slot, own) in zip(prompts, slots, strict=True):
                prefill(self._target, theirs, slot, prompt[:-1])
                prefill(self._draft, ours, own, prompt[:-1])
            active = list(range(len(prompts)))
            tokens = [prompt[-1] for prompt in prompts]
            for _ in range(how.steps):
                if not active or time.monotonic() > ends:
                    return
                target_slots, draft_slots = ([slots[each][side] for each in active] for side in (0, 1))
                p_BV = self._law(_rows(self._target, theirs, target_slots, tokens, None), how.temperature)
                output = self._draft_rows(draft_slots, tokens)
                q_BV, pre_BD = self._law(output, how.temperature)[:, : self._width], self._states(output)
                _commit(theirs, target_slots)
                _commit(ours, draft_slots)
                proposed = _pick(q_BV, how, generator)
                post_BD = self._states(self._draft_rows(draft_slots, proposed))  # not committed: it may be rejected
                p_B, q_B = _at(p_BV, proposed), _at(q_BV, proposed)
                facts_B3 = facts_of(q_BV, torch.tensor(proposed, device=q_BV.device))
                yield pre_BD.cpu(), post_BD.cpu(), facts_B3.cpu(), p_B.cpu(), q_B.cpu(), torch.tensor(active)
                certain = (q_B <= p_B * how.ratio).tolist()
                others = _pick(p_BV[:, : self._width], how, generator)
                chosen = [y if good else z for y, z, good in zip(proposed, others, certain, strict=True)]
                kept = [place for place, token in enumerate(chosen) if token not in self._target.end_ids]
                active, tokens = [active[place] for place in kept], [chosen[place] for place in kept]
        finally:
            for slot, own in slots:
                theirs.release(slot)
                ours.release(own)

    def _draft_rows(self, slots: Sequence[int], tokens: Sequence[int]) -> Output:
        return _rows(self._draft, self._caches[1], slots, tokens, self._last.span)

    def _states(self, output: Output) -> Tensor:
        return self._last.of(output, list(range(len(output.best))))

    def _law(self, output: Output, temperature: float) -> Tensor:
        return torch.softmax(output.logits_MV.float() / (temperature or 1.0), dim=-1)


def _rows(
    model: LanguageModel, cache: KVCache, slots: Sequence[int], tokens: Sequence[int], span: Span | None
) -> Output:
    """Run one token after each prefix; the caller commits it."""
    batch = PackedBatch()
    for slot, token in zip(slots, tokens, strict=True):
        cache.reserve(slot, 1)
        batch.add_chunk(slot, cache.lengths[slot], [token], wanted=1)
    return model.forward(batch, DensePlan(cache, batch), span=span)


def _commit(cache: KVCache, slots: Sequence[int]) -> None:
    for slot in slots:
        cache.commit(slot, [0])


def _pick(law_BV: Tensor, how: Collecting, generator: torch.Generator) -> list[int]:
    found_B = torch.multinomial(law_BV, 1, generator=generator)[:, 0] if how.temperature else law_BV.argmax(-1)
    return found_B.tolist()


def _at(law_BV: Tensor, tokens: Sequence[int]) -> Tensor:
    return law_BV.gather(1, torch.tensor(tokens, device=law_BV.device)[:, None])[:, 0]


def prompts_of(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    how: Collecting,
    read: list[str] | None = None,
) -> Iterator[list[int]]:
    """Yield prompts as ids; every document once, in an order by shares.

    A prompt is the first part of the document; with ``replies`` it ends where a reply begins, or anywhere in a text
    without replies. Prompts of fewer than two tokens are left out.

    Args:
        read: receives the name of each prompt's source, in order.
    """
    encode = encoder(tokenizer)
    rng = random.Random(f"sprinter {how.seed}")
    readers = [(source.documents(), source.share, source.name) for source in sources]
    while readers:
        [place] = rng.choices(range(len(readers)), [weight for _, weight, _ in readers])
        document = next(readers[place][0], None)
        if document is None:
            del readers[place]
            continue
        if how.replies:
            [ids] = tokenizer([beginning(opening(document, rng), tokenizer)], add_special_tokens=False)["input_ids"]
            part = ids[-longest:]
        else:
            [ids] = encode([document])
            part = ids[: min(int(len(ids) * how.share), longest)]
        if len(part) >= 2:
            if read is not None:
                read.append(readers[place][2])
            yield part
