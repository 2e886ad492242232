"""A trace: the target's own answers, recorded once by plain decoding, along which every drafter can be replayed."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from foretoken.core.draft import Draft
from foretoken.core.errors import InputError, RequestError
from foretoken.core.files import write_whole
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.engine.llm import LLM
from foretoken.engine.request import Request
from foretoken.engine.step import Engine
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.match import MatchVerifier

_LEAST_TOKENS = 16  # of an answer that is cut because the time is over
TRACE_FILE = "trace.jsonl"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """One recorded answer.

    Attributes:
        prompt: index of its prompt among those that were given.
        prompt_ids, tokens: the prompt and the answer, as the target saw them.
        log_p: of each token of the answer, under the processed distribution; 0 at temperature 0.
        prompt_seconds: until the first token.
        step_seconds, rest_seconds: mean time of a decoding step, and of its part outside of the forward.
        limit: tokens that it might have had; its own number where it was cut.
        seed: of its sampling.
    """

    prompt: int
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    log_p: tuple[float, ...]
    prompt_seconds: float
    step_seconds: float
    rest_seconds: float
    limit: int
    seed: int | None = None

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt_ids, *self.tokens]


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded answers and the parameters that they were sampled by."""

    params: SamplingParams
    answers: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens) for each in self.answers)

    def params_of(self, answer: Answer) -> SamplingParams:
        """Parameters that give this answer again, and its bound."""
        return replace(self.params, max_tokens=answer.limit, seed=answer.seed, min_tokens=0)

    def save(self, folder: Path) -> None:
        """Write one JSON object a line: the parameters, then the answers."""
        folder.mkdir(parents=True, exist_ok=True)
        first = {"format": FORMAT, "temperature": self.params.temperature, "max_tokens": self.params.max_tokens}
        lines = [json.dumps(first), *(json.dumps(asdict(each)) for each in self.answers)]
        write_whole(folder / TRACE_FILE, "\n".join(lines) + "\n")


class _SampleAndKeep(MatchVerifier):
    """Plain sampling that keeps the log-probability of each emitted token."""

    def __init__(self) -> None:
        self.log_p: list[float] = []

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        verdict = super().verify(draft, target, rng)
        self.log_p.append(0.0 if target.greedy else math.log(max(float(target.p_at(0)[verdict.extra]), 1e-300)))
        return verdict


def run_alone(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams, until: float = math.inf) -> Request:
    """Run one request on an engine to its end, or to a moment of ``time.perf_counter``.

    Raises:
        RequestError: it failed.
    """
    (request,) = llm.new_requests({"prompt_token_ids": list(prompt_ids)}, params)
    return driven(llm.engine, request, until)


def driven(engine: Engine, request: Request, until: float = math.inf) -> Request:
    """Step an engine until its only request has ended; see :func:`run_alone`."""
    engine.add(request)
    try:
        while not request.finished:
            engine.step()
            if perf_counter() > until and request.num_output >= _LEAST_TOKENS:
                break
    finally:
        engine.cancel(request)
    if request.finish_reason == "error":
        raise RequestError(request.error or "the request failed")
    return request


def record(
    target: Any,
    prompts: Sequence[tuple[int, Sequence[int]]],
    params: SamplingParams,
    seconds: float,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
    *,
    intake: float = 0.0,
) -> Trace:
    """Answer prompts by plain decoding, one after the other, until they are answered or the time is over.

    Args:
        target: the loaded model.
        prompts: index and token ids of each; an index shifts the seed, as in a benchmark of the same prompts.
        seconds: begin no answer after them, and cut the one that is under way.
        progress: called after each answer with how many there are, and their tokens.
        intake: seconds of templates and tokenizer for a prompt, which count as its reading.
    Raises:
        InputError: there are no prompts.
    """
    if not prompts:
        raise InputError("no prompts to record: give at least one")
    rule = _SampleAndKeep()
    config = {"method": "none", "verifier": rule}
    llm = LLM.from_target(target, speculative_config=config, max_num_seqs=1, enable_prefix_caching=False)
    run_alone(llm, prompts[0][1], replace(params, max_tokens=4, min_tokens=0))  # warm-up
    until = perf_counter() + seconds
    answers: list[Answer] = []
    for index, ids in prompts:
        seed = ((params.seed or 0) + index) % 2**63  # replays of coupled drafts need one
        rule.log_p.clear()
        request = run_alone(llm, ids, replace(params, seed=seed), until)
        emitted = request.metrics.emitted
        decoding = emitted[-1].seconds - emitted[0].seconds
        answers.append(
            Answer(
                index,
                tuple(ids),
                tuple(request.output_ids),
                tuple(rule.log_p),
                intake + emitted[0].seconds,
                decoding / max(1, len(emitted) - 1),
                request.metrics.other_seconds / request.metrics.num_steps,
                params.max_tokens if request.finish_reason in ("stop", "length") else request.num_output,
                seed,
            )
        )
        progress(len(answers), sum(len(each.tokens) for each in answers))
        if perf_counter() > until:
            break
    llm.close()
    return Trace(params, tuple(answers))
