"""Run a task through the engine: accuracy, cost, and the probability of the outputs under the plain target.

A lossless method gives the outputs of plain decoding, so its accuracy is the model's. For a method that approximates,
the difference is what its speed costs. Two figures watch it: accuracy, which needs hundreds of examples to show a loss
of a few per cent, and ``nll``, the mean negative log-likelihood of the outputs under the plain target (dense attention,
temperature 1, no speculation), which shows at a glance whether the outputs are still the target's.

Letters: M wanted rows of a forward, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretoken.core.errors import InputError
from foretoken.core.metrics import Metrics
from foretoken.engine.llm import LLM
from foretoken.engine.output import RequestOutput
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import chunks
from foretoken.options.sampling import SamplingParams
from foretoken_lab.intervals import wilson_interval
from foretoken_lab.tasks.catalog import Task
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.prompt_ids import question_ids

_ROWS = 128  # rows of a scoring forward: its logits are rows * vocabulary numbers


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one example.

    Attributes:
        output: the generated text.
        token_ids: the generated tokens, a stop token included.
        finish_reason: "stop", "length", or "error".
        scores: measure -> share; empty if the request failed.
        nll: summed negative log-likelihood of the tokens under the plain target, in nats.
        error: why the request failed, or None.
    """

    example: Example
    output: str
    token_ids: tuple[int, ...]
    finish_reason: str
    scores: Mapping[str, float]
    nll: float
    error: str | None = None

    @property
    def correct(self) -> bool:
        """Whether the answer counts as right."""
        return self.scores.get("correct", 0.0) == 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one task. Failed requests and prompts that do not fit count nowhere but in their own fields.

    Attributes:
        task: its name.
        answers: one per example, failures included.
        num_examples: answers that were scored.
        accuracy: share of right answers; None for a task without right and wrong.
        interval: Wilson's 95 % interval of the accuracy.
        measures: means of the other measures (f1, parses, rouge1 ...).
        categories: category -> number of examples, and accuracy or the mean of every measure.
        nll: mean negative log-likelihood per output token under the plain target, in nats.
        truncated: answers that were cut at max_tokens.
        refused: examples that were left out because prompt and answer do not fit the model's context.
        failed: requests that ended with an error.
        mean_tokens: tokens per answer.
        tokens_per_step, tokens_per_second, distortion, kl: as in :mod:`foretoken.core.metrics`; seconds are wall time,
            all requests together, and kl may be infinite.
        flops: of all forwards of target and drafter after the prompt, counted as in :mod:`foretoken.models.work`; a
            prompt's last token counts as the first step's. None where the drafter has a network of its own that does
            not count.
        promise: what the recipe promises for these sampling parameters.
        seconds: wall time of generating (not of scoring).
        metrics: the counters of all requests, added up.
    """

    task: str
    answers: tuple[Answer, ...]
    num_examples: int
    accuracy: float | None
    interval: tuple[float, float] | None
    measures: Mapping[str, float]
    categories: Mapping[str, Mapping[str, float]]
    nll: float
    truncated: int
    refused: int
    failed: int
    mean_tokens: float
    tokens_per_step: float
    tokens_per_second: float
    distortion: float
    kl: float
    flops: float | None
    promise: str
    seconds: float
    metrics: Metrics

    @property
    def flops_per_token(self) -> float | None:
        """``flops`` over the emitted tokens."""
        return None if self.flops is None or not self.metrics.num_tokens else self.flops / self.metrics.num_tokens

    def fields(self) -> dict[str, Any]:
        """The figures as one flat JSON object, without the answers."""
        return {
            "task": self.task,
            "num_examples": self.num_examples,
            "accuracy": self.accuracy,
            "interval": None if self.interval is None else list(self.interval),
            **self.measures,
            "categories": {name: dict(values) for name, values in self.categories.items()},
            "nll": self.nll,
            "truncated": self.truncated,
            "refused": self.refused,
            "failed": self.failed,
            "mean_tokens": self.mean_tokens,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "distortion": self.distortion,
            "kl": self.kl,
            "flops_per_token": self.flops_per_token,
            "promise": self.promise,
            "seconds": self.seconds,
        }


def evaluate(
    llm: LLM,
    task: Task,
    examples: Sequence[Example],
    params: SamplingParams,
    *,
    scorer: LanguageModel | None = None,
    progress: Callable[[], None] | None = None,
) -> Report:
    """Ask a model a task's examples and score its outputs.

    Args:
        llm: the model with its recipe; prompts go through its chat template if it has one.
        task: gives the name and the score.
        examples: what to ask.
        params: for every example; a seed is shifted by the example's number.
        scorer: gives the nll, of the same vocabulary; None: the model that answers.
        progress: called once for every example that is finished or left out.
    Raises:
        InputError: no example fits the model's context.
        ConfigError: params do not fit the recipe.
    """
    prompts = [question_ids(llm, example.prompt) for example in examples]
    room = llm.target.max_length - params.max_tokens
    asked = [index for index, ids in enumerate(prompts) if len(ids) <= room]
    if not asked:
        shortest = min(map(len, prompts), default=0)
        raise InputError(
            f"task '{task.name}': no example fits. The shortest prompt has {shortest} tokens and an answer may take "
            f"{params.max_tokens}; the context of model '{llm.target.name}' holds {llm.target.max_length}"
        )
    for _ in range(len(examples) - len(asked)):
        if progress is not None:
            progress()
    before = _flops(llm)
    started = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[index]} for index in asked],
        [_seeded(params, index) for index in asked],
        progress=None if progress is None else lambda output: progress(),
    )
    seconds = time.perf_counter() - started
    after = _flops(llm)
    flops = None if before is None or after is None else after - before - _reading(llm, outputs)
    scorer = llm.target if scorer is None else scorer
    pairs = zip(asked, outputs, strict=True)
    answers = tuple(_answer(scorer, task, examples[index], output) for index, output in pairs)
    total = Metrics()
    for output in outputs:
        total.add(output.metrics)
    promise = llm.recipe.promise_for(params)
    return _report(task, answers, total, seconds, flops, promise, refused=len(examples) - len(asked))


def negative_log_likelihood(target: LanguageModel, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """-log p(output | prompt) in nats, under the target alone: dense attention, temperature 1.

    The sequence is read in chunks of rows, so that the logits never take more than a few rows of the vocabulary.
    """
    if not output_ids:
        return 0.0
    # the last token is only ever predicted, never read
    read = [*prompt_ids, *output_ids[:-1]]
    first = len(prompt_ids) - 1  # the row that predicts the first output token
    cache = target.new_cache(1)
    slot = cache.acquire()
    total = 0.0

    def behind(begin: int, end: int) -> int:
        return min(end - begin, max(0, end - first))

    for begin, end, batch in chunks(cache, slot, read, rows=_ROWS, wanted=behind):
        output = target.forward(batch, DensePlan(cache, batch))
        if wanted := behind(begin, end):
            start = end - wanted - first
            expected_M1 = torch.tensor(output_ids[start : start + wanted], device=target.device)[:, None]
            logp_MV = torch.log_softmax(output.logits_MV.float(), dim=-1)
            total -= float(logp_MV.gather(1, expected_M1).sum())
    return total


def _flops(llm: LLM) -> float | None:
    """Of everything that target and drafter have computed so far; None where the drafter does not count its own."""
    drafter = llm.recipe.drafter
    return None if drafter.flops is None else llm.target.flops + drafter.flops


def _reading(llm: LLM, outputs: Sequence[RequestOutput]) -> float:
    """What of that went into prompts: the target read all tokens but the last, a draft model all, if it drafted."""
    total = 0.0
    for output in outputs:
        length = len(output.prompt_token_ids)
        total += llm.target.reading_flops(length - 1)
        if output.metrics.num_draft_tokens:
            total += llm.recipe.drafter.reading_flops(length)
    return total


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + index) % 2**63)


def _answer(scorer: LanguageModel, task: Task, example: Example, output: Any) -> Answer:
    failed = output.error is not None
    return Answer(
        example,
        output.text,
        tuple(output.token_ids),
        output.finish_reason,
        {} if failed else task.score(output.text.strip(), example),
        0.0 if failed else negative_log_likelihood(scorer, output.prompt_token_ids, output.token_ids),
        output.error,
    )


def _report(
    task: Task,
    answers: tuple[Answer, ...],
    total: Metrics,
    seconds: float,
    flops: float | None,
    promise: str,
    *,
    refused: int,
) -> Report:
    scored = [answer for answer in answers if answer.error is None]
    by_category: dict[str, list[Answer]] = {}
    for answer in scored:
        by_category.setdefault(answer.example.category, []).append(answer)
    measures = _means(scored)
    accuracy = measures.pop("correct", None)
    num_correct = sum(answer.correct for answer in scored)
    num_tokens = sum(len(answer.token_ids) for answer in scored)
    return Report(
        task=task.name,
        answers=answers,
        num_examples=len(scored),
        accuracy=accuracy,
        interval=None if accuracy is None else wilson_interval(num_correct, len(scored)),
        measures=measures,
        categories={name: _category(each) for name, each in sorted(by_category.items())},
        nll=sum(answer.nll for answer in scored) / num_tokens if num_tokens else math.nan,
        truncated=sum(answer.finish_reason == "length" for answer in scored),
        refused=refused,
        failed=len(answers) - len(scored),
        mean_tokens=num_tokens / len(scored) if scored else 0.0,
        tokens_per_step=total.tokens_per_step,
        tokens_per_second=total.num_tokens / seconds if seconds > 0 else 0.0,
        distortion=total.distortion,
        kl=total.kl,
        flops=flops,
        promise=promise,
        seconds=seconds,
        metrics=total,
    )


def _category(answers: Sequence[Answer]) -> dict[str, float]:
    means = _means(answers)
    accuracy = {"accuracy": means.pop("correct")} if "correct" in means else {}
    return {"num_examples": len(answers), **accuracy, **means}


def _means(answers: Sequence[Answer]) -> dict[str, float]:
    """Every measure's mean over the answers."""
    names = list(dict.fromkeys(name for answer in answers for name in answer.scores))
    return {name: sum(answer.scores[name] for answer in answers) / len(answers) for name in names}
