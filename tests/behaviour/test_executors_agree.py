"""Whatever its order and its pace, an executor commits what the serial one commits: a list of all, to which one adds.

The model is tiny, and drafts, lengths, arrivals and cancellations are random; every verb of the engine takes a random
time, so that an executor that runs two of them at once meets every order.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.engine import executors
from foretoken.engine.executors.executor import Executor, Verbs
from foretoken.engine.executors.overlap import AssumedContext, DraftOrError
from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.serial import SerialExecutor
from foretoken.engine.llm import LLM
from foretoken.engine.request import Request
from foretoken.engine.round import Job, Round
from foretoken.engine.scheduler import Work
from foretoken.forward.batch import PackedBatch
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab import testing as stubs
from helpers.adapters import shelf
from helpers.requests import make_request
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.zoo_llms import assert_idle

EXECUTORS = executors.NAMED
LONGEST_DELAY = 0.001  # seconds; more would only make the tests slow


class Delayed(Verbs):
    """An engine with slow verbs."""

    def __init__(self, engine: Verbs, dice: random.Random) -> None:
        self._engine = engine
        self._dice = dice
        self._lock = threading.Lock()  # of the dice: an executor may call from several threads

    def _wait(self) -> None:
        with self._lock:
            seconds = self._dice.choice([0.0, 0.0, self._dice.uniform(0.0, LONGEST_DELAY)])
        if seconds:
            time.sleep(seconds)

    def schedule(self) -> Work:
        self._wait()
        return self._engine.schedule()

    def propose(self, work: Work) -> list[Draft]:
        self._wait()
        drafts = self._engine.propose(work)
        self._wait()
        return drafts

    def node_budgets(self, work: Work) -> list[int]:
        return self._engine.node_budgets(work)

    def ahead(
        self, shadows: Sequence[AssumedContext], rooms: Sequence[int], stopped: Callable[[], bool]
    ) -> list[DraftOrError]:
        self._wait()
        found = self._engine.ahead(shadows, rooms, stopped)
        self._wait()
        return found

    def expect(self, current: Round, shadows: Sequence[AssumedContext], ahead: Sequence[DraftOrError]) -> None:
        self._wait()
        self._engine.expect(current, shadows, ahead)

    def pack(self, work: Work, drafts: Sequence[Draft]) -> Round:
        self._wait()
        return self._engine.pack(work, drafts)

    def forward(self, current: Round) -> None:
        self._wait()
        self._engine.forward(current)
        self._wait()

    def verify(self, current: Round) -> None:
        self._wait()
        self._engine.verify(current)

    def commit(self, current: Round) -> list[Request]:
        self._wait()
        return self._engine.commit(current)

    def account(self, current: Round, *, draft: float, verify: float, total: float) -> None:
        self._engine.account(current, draft=draft, verify=verify, total=total)


class Paced:
    """An executor over such an engine."""

    name = "paced"

    def __init__(self, inner: Executor, seed: int) -> None:
        self._inner = inner
        self._dice = random.Random(seed)

    def step(self, engine: Verbs) -> list[Request]:
        return self._inner.step(Delayed(engine, self._dice))

    def close(self) -> None:
        self._inner.close()


class Failing(stubs.Random):
    """Random drafts; for one prompt it raises once two tokens are there."""

    def __init__(self, culprit: Sequence[int]) -> None:
        super().__init__(VOCAB_SIZE, tree=False)
        self._culprit = list(culprit)

    def draft(self, context, budget):
        if list(context.tokens[: context.num_prompt]) == self._culprit and len(context.tokens) > context.num_prompt + 2:
            raise ValueError("nothing comes to mind")
        return super().draft(context, budget)


@dataclass(frozen=True)
class Scene:
    """What users ask for, and what the recipe is.

    Attributes:
        prompts, params: of every request.
        kind: of the drafts.
        cancelled: requests with a stream that is closed after so many chunks.
        slots, rows: bounds of the engine.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    kind: str
    cancelled: dict[int, int] = field(default_factory=dict)
    slots: int = 4
    rows: int = 64


@cache
def model() -> LanguageModel:
    return load(save_model("llama", shelf() / "executors"), device="cpu")


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    count = draw(st.integers(1, 5))
    token = st.integers(4, VOCAB_SIZE - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=count, max_size=count, unique_by=tuple))
    temperatures = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=count, max_size=count))
    params = [
        SamplingParams(temperature=temperature, max_tokens=draw(st.integers(1, 14)), ignore_eos=True, seed=index)
        for index, temperature in enumerate(temperatures)
    ]
    kind = draw(st.sampled_from(["chain", "tree", "oracle", "spoilt", "wrong", "failing"]))
    cancelled = draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 3), max_size=2))
    return Scene(prompts, params, kind, cancelled, draw(st.integers(1, 4)), draw(st.sampled_from([5, 16, 64])))


def drafter_of(scene: Scene) -> stubs.Stub:
    if scene.kind in ("chain", "tree"):
        return stubs.Random(VOCAB_SIZE, tree=scene.kind == "tree", seed=3)
    if scene.kind == "failing":
        return Failing(scene.prompts[0])
    plain = LLM.from_target(model(), max_num_seqs=4)
    outputs = plain.generate([{"prompt_token_ids": prompt} for prompt in scene.prompts], scene.params)
    texts = {tuple(prompt): each.token_ids for prompt, each in zip(scene.prompts, outputs, strict=True)}
    return stubs.Scripted(texts, {"oracle": 1.0, "spoilt": 0.7, "wrong": 0.0}[scene.kind])


Told = tuple[list[int], str | None, str | None]


def play(scene: Scene, executor: Executor | None) -> list[Told]:
    """The result of every request: tokens, why it ended, and its error. None: the engine's own executor."""
    config: dict[str, Any] = {"method": drafter_of(scene), "verifier": "match", "num_speculative_tokens": 4}
    llm = LLM.from_target(
        model(), speculative_config=config, max_num_seqs=scene.slots, max_rows_per_step=scene.rows, seed=0
    )
    if executor is not None:
        llm.engine.executor = executor
    prompts = [{"prompt_token_ids": prompt} for prompt in scene.prompts]
    outputs = llm.generate(prompts, scene.params)
    told: list[Told] = [(each.token_ids, each.finish_reason, each.error) for each in outputs]
    for index, chunks in scene.cancelled.items():  # and once more as streams, which end in the middle
        if outputs[index].error is None:
            stream = llm.stream(prompts[index], scene.params[index])
            got = [token for _, chunk in zip(range(chunks), stream, strict=False) for token in chunk.token_ids]
            stream.close()
            assert got == outputs[index].token_ids[: len(got)]
    assert_idle(llm)
    llm.close()
    return told


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
@settings(max_examples=15, deadline=None)
@given(scene=scenes(), seed=st.integers(0, 2**31))
def test_an_executor_commits_what_the_serial_one_commits(make: Callable[[], Executor], scene: Scene, seed: int) -> None:
    if make is not SerialExecutor and scene.kind == "tree":  # refused when the recipe is made: only a chain can be cut
        scene = replace(scene, kind="chain")
    assert play(scene, Paced(make(), seed)) == play(scene, None)


def verb_of(now: list[float], seconds: float, result: object = None) -> Callable[..., object]:
    """A verb of an engine that takes so long by the clock ``now``."""

    def called(*given: object) -> object:
        now[0] += seconds
        return result

    return called


def test_the_parts_of_a_serial_step_get_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], dict[str, float]()
    request = make_request([5])
    current = Round(PackedBatch(), [Job(request, NO_DRAFT, 1, 1)], [])

    verb = partial(verb_of, now)
    engine: Any = SimpleNamespace(
        schedule=verb(1.0, Work([request], [], 0)),
        propose=verb(2.0, [NO_DRAFT]),
        pack=verb(4.0, current),
        forward=verb(8.0),
        verify=verb(16.0),
        commit=verb(32.0, [request]),
        account=lambda current, **times: told.update(times),
    )
    for module in ("executor", "serial"):
        monkeypatch.setattr(f"foretoken.engine.executors.{module}.perf_counter", lambda: now[0])
    executor = SerialExecutor()
    assert executor.step(engine) == [request]
    assert told == {"draft": 2.0, "verify": 8.0, "total": 63.0}


def test_the_parts_of_an_overlapped_step_get_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes what the target waits for it, once it is done itself."""
    now, told = [100.0], dict[str, float]()
    request = make_request([5])
    current = Round(PackedBatch(), [Job(request, NO_DRAFT, 1, 1)], [])

    verb = partial(verb_of, now)

    def ahead(shadows: Sequence[AssumedContext], rooms: Sequence[int], stopped: Callable[[], bool]) -> list[Draft]:
        while not stopped():
            time.sleep(0.001)
        now[0] += 2.0
        return [NO_DRAFT]

    engine: Any = SimpleNamespace(
        schedule=verb(1.0, Work([request], [], 0)),
        node_budgets=verb(4.0, [3]),
        pack=verb(8.0, current),
        ahead=ahead,
        forward=verb(16.0),
        expect=verb(32.0),
        verify=verb(64.0),
        commit=verb(128.0, [request]),
        account=lambda current, **times: told.update(times),
    )
    for module in ("executor", "overlapped"):
        monkeypatch.setattr(f"foretoken.engine.executors.{module}.perf_counter", lambda: now[0])
    executor = OverlappedExecutor()
    assert executor.step(engine) == [request]
    executor.close()
    assert current.ahead
    assert told == {"draft": 2.0, "verify": 16.0, "total": 255.0}


class Hasty(SerialExecutor):
    """Planted: it lets the first token of a draft stand that its verdict refuses, as if the verdict came too late."""

    def step(self, engine: Verbs) -> list[Request]:
        work = engine.schedule()
        current = engine.pack(work, engine.propose(work))
        if not current.jobs:
            return current.failed
        engine.forward(current)
        engine.verify(current)
        for job in current.jobs:
            if job.verdict is not None and len(job.draft) and not job.verdict.path:
                job.verdict = type(job.verdict)(path=(0,), extra=job.verdict.extra)
        return current.failed + engine.commit(current)


def test_an_executor_that_does_not_wait_for_verdicts_is_caught() -> None:
    params = [SamplingParams(max_tokens=8, ignore_eos=True)]
    scene = Scene([[5, 9, 11]], params, "wrong")
    assert play(scene, Hasty()) != play(scene, None)
