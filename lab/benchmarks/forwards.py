"""The only place of these scripts that touches the engine's inside: forwards, caches, requests and step times.

Everything here follows ``src/foretoken/engine/step.py``; when that changes, change this file, too.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.engine.request import Request
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.native import build


@contextlib.contextmanager
def without_fused() -> Iterator[None]:
    """Models loaded inside take the general path; a process looks for the native library only once."""
    before = os.environ.get("FORETOKEN_NATIVE", "1")
    try:
        os.environ["FORETOKEN_NATIVE"] = "0"
        build.library.cache_clear()
        yield
    finally:
        os.environ["FORETOKEN_NATIVE"] = before
        build.library.cache_clear()


class Decoder:
    """A greedy loop written by hand over ``LanguageModel.forward``: what plain decoding costs at the least."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.cache = model.new_cache(1)
        self.slot = self.cache.acquire()
        self.tokens: list[int] = []

    def prefill(self, ids: Sequence[int]) -> None:
        """Read a prompt and append its first token."""
        self.cache.rollback(self.slot, 0)
        self.tokens = list(ids)
        logits_1V = self.forward(self.tokens, wanted=1)
        self.cache.commit(self.slot, range(len(ids)))
        self.tokens.append(int(logits_1V[0].argmax()))

    def step(self) -> None:
        """One token."""
        cache, slot = self.cache, self.slot
        cache.reserve(slot, 1)
        batch = PackedBatch()
        batch.add_chunk(slot, cache.lengths[slot], self.tokens[-1:], wanted=1)
        token = self.model.forward(batch, DensePlan(cache, batch)).best[0]
        cache.commit(slot, (0,))
        self.tokens.append(token)

    def forward(self, tokens: Sequence[int], wanted: int) -> torch.Tensor:
        """Logits of the last ``wanted`` of some rows after the prefix; nothing is committed."""
        cache, slot = self.cache, self.slot
        cache.reserve(slot, len(tokens))
        batch = PackedBatch()
        batch.add_chunk(slot, cache.lengths[slot], tokens, wanted=wanted)
        return self.model.forward(batch, DensePlan(cache, batch)).logits_MV

    def pack(self, tokens: Sequence[int]) -> tuple[PackedBatch, DensePlan]:
        """What a forward needs, without the forward."""
        cache, slot = self.cache, self.slot
        cache.reserve(slot, len(tokens))
        batch = PackedBatch()
        batch.add_chunk(slot, cache.lengths[slot], tokens, wanted=len(tokens))
        return batch, DensePlan(cache, batch)


@dataclass
class Step:
    """One engine step.

    Attributes:
        seconds: wall time of the step.
        forward: of that, inside model forwards, the draft's included.
        prompt: whether the step read (a part of) a prompt of the target.
        tokens: tokens emitted.
    """

    seconds: float
    forward: float
    prompt: bool
    tokens: int


@dataclass
class Watch:
    """What the clock saw: steps, and the time inside forwards since it was last read."""

    steps: list[Step] = field(default_factory=list)
    forward: float = 0.0


@contextlib.contextmanager
def watch(llm: LLM) -> Iterator[Watch]:
    """Time every step of an engine and every model forward in it, from outside."""
    seen = Watch()
    plain_forward, plain_step = LanguageModel.forward, llm.engine.step
    clock = time.perf_counter

    def forward(self: LanguageModel, *args: Any, **kwargs: Any) -> Any:
        began = clock()
        try:
            return plain_forward(self, *args, **kwargs)
        finally:
            seen.forward += clock() - began

    def step() -> list[Request]:
        scheduler = llm.engine.scheduler
        prompt = bool(scheduler.waiting) or any(r.num_output == 0 for r in scheduler.running)
        before = sum(r.num_output for r in scheduler.running)
        seen.forward = 0.0
        began = clock()
        touched = plain_step()
        seconds = clock() - began
        tokens = sum(r.num_output for r in touched) - before
        seen.steps.append(Step(seconds, seen.forward, prompt, tokens))
        return touched

    LanguageModel.forward = forward  # type: ignore[method-assign]
    llm.engine.step = step  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        LanguageModel.forward = plain_forward  # type: ignore[method-assign]
        del llm.engine.step


def greedy(llm: LLM, ids: Sequence[int], num_tokens: int) -> list[int]:
    """Exactly so many tokens, end-of-text ignored."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(ids)}], params)
    if output.error is not None:
        raise RuntimeError(output.error)
    return output.token_ids


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


_PAUSE = 0.05


def interleaved(calls: dict[Any, Callable[[], Any]], repeats: int, warm_up: int = 3) -> dict[Any, list[float]]:
    """Seconds of every call, all calls in turn, the first one rotating.

    Threads of the engine before keep spinning for a while, so every turn begins with a pause; then a call that does not
    count wakes the engine's own threads, as they are when it decodes.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    names = list(calls)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for number in range(repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(_PAUSE)
            calls[name]()
            seconds[name].append(timed(calls[name]))
    return seconds


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes of a sample."""
    ordered = sorted(values)
    if len(ordered) == 1:
        lower = middle = upper = ordered[0]
    else:
        lower, middle, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    low, high = ordered[0], ordered[-1]
    return {"median": middle, "lower": lower, "upper": upper, "min": low, "max": high, "num": len(ordered)}
