"""Distributions of a target and a draft model at real positions: on text that the target wrote itself, under its own
sampling.

The target samples an answer to every prompt by plain decoding. Then both models read prompt and answer once, and their
logits at a few positions of the answer become distributions by the engine's own function (core/laws.py), with the
temperature and top_p under which the answer was sampled. These are the p and q that a verifier meets at the root of a
draft.

Letters: M rows, V the target's vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError, RequestError
from foretoken.core.laws import LawMaker
from foretoken.core.randomness import mix64
from foretoken.core.tree import EMPTY_TREE, ROOT
from foretoken.engine.llm import LLM
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.models.prefill import chunks
from foretoken.models.vocabulary import different_vocabulary
from foretoken.options.sampling import SamplingParams

_ROWS = 128  # rows of a forward: its logits are rows * vocabulary numbers


@dataclass(frozen=True, slots=True)
class Observed:
    """The distributions at some positions of one answer.

    Attributes:
        prompt: index of the prompt.
        positions: index of the decided token in the answer, M integers, ascending.
        p_MV: the target's processed distributions, float32.
        q_MV: the draft's, over the target's vocabulary.
    """

    prompt: int
    positions: tuple[int, ...]
    p_MV: Tensor
    q_MV: Tensor


def load_draft(name: str, target: LanguageModel) -> LanguageModel:
    """A draft model in the target's dtype and place.

    Raises:
        MismatchError: its tokens are not the target's.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    draft = load(name, dtype=dtype, device=str(target.device), trust_remote_code=target.trusted)
    reason = different_vocabulary(target.tokenizer, draft.tokenizer)
    if reason is not None:
        raise MismatchError(
            f"draft '{name}' has another vocabulary than '{target.name}' ({reason}): "
            "use one with the target's tokenizer"
        )
    return draft


def observe(
    llm: LLM,
    draft: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_positions: int,
    *,
    progress: Callable[[], None] | None = None,
) -> Iterator[Observed]:
    """Sample an answer to every prompt and give the distributions at seeded random positions of it.

    One prompt's distributions are in memory at a time.

    Args:
        llm: the target, without a method.
        draft: made by :func:`load_draft`.
        prompts: token ids.
        params: with a temperature above 0, a seed and the longest answer; prompt i samples with a seed made from it.
        num_positions: of an answer, at most; those beyond the draft's context are left out.
        progress: called once for every prompt.
    Raises:
        RequestError: a request failed.
    """
    assert params.seed is not None
    seeds = [mix64(params.seed ^ mix64(index)) >> 1 for index in range(len(prompts))]
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts], [replace(params, seed=seed) for seed in seeds]
    )
    for index, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        if output.error is not None:
            raise RequestError(f"prompt {index}: {output.error}")
        answer = list(output.token_ids)
        room = min(len(answer), draft.max_length - len(ids) + 1)
        if room > 0:
            positions = sorted(random.Random(seeds[index]).sample(range(room), min(num_positions, room)))
            read = [*ids, *answer[: positions[-1]]]
            rows = [len(ids) - 1 + position for position in positions]
            laws = [_laws(model, read, rows, params, llm.target.vocab_size) for model in (llm.target, draft)]
            yield Observed(index, tuple(positions), *laws)
        if progress is not None:
            progress()


def _laws(
    model: LanguageModel, tokens: Sequence[int], rows: Sequence[int], params: SamplingParams, size: int
) -> Tensor:
    """float32 [M, V] on the CPU: the processed distributions after the given tokens, in one dense reading."""
    maker = LawMaker(params, (), size, device=model.device)
    cache = model.new_cache(1)
    slot = cache.acquire()
    kept = []

    def within(begin: int, end: int) -> list[int]:
        return [row - begin for row in rows if begin <= row < end]

    def wanted(begin: int, end: int) -> int:
        here = within(begin, end)
        return end - begin - here[0] if here else 0

    for begin, end, batch in chunks(cache, slot, tokens, rows=_ROWS, wanted=wanted):
        output = model.forward(batch, DensePlan(cache, batch))
        here = within(begin, end)
        if here:
            picked = torch.tensor([row - here[0] for row in here], device=output.logits_MV.device)
            logits_MV = _fit(output.logits_MV[picked], size)
            kept.append(torch.softmax(maker.process(logits_MV, EMPTY_TREE, [ROOT] * len(here)), -1).cpu())
    return torch.cat(kept)


def _fit(logits_MV: Tensor, size: int) -> Tensor:
    """Over the target's vocabulary: tables of embeddings may be padded to different sizes."""
    width = logits_MV.shape[-1]
    if width < size:
        return torch.nn.functional.pad(logits_MV, (0, size - width), value=-torch.inf)
    return logits_MV[:, :size]
