"""The drafting side in its places: the same text, late copies, bytes, requests that come and go, and lost helpers."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.drafting import process
from foretoken.engine.llm import LLM
from foretoken.methods.dovetail import remote_head, staging
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken.methods.dovetail.lanes import InPlace, InProcess, OnThread
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.dovetail.staging import Staging
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers import delays as delays_at
from helpers.adapters import shelf
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import assert_idle, with_config

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [tokens_of(seed, 5 + 13 * seed, 100) for seed in range(4)]
WIDTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": WIDTH, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


@pytest.fixture(scope="module")
def plain(model: LanguageModel) -> list[list[int]]:
    return texts(with_config({"method": "none"}, target=model))


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def engine(model: LanguageModel, **options: Any) -> LLM:
    folder = untrained(Dovetail, model, Path(shelf(), f"lanes-{id(model)}"), draft_vocab_size=60)
    drafts = {"head": folder, "budget": "fixed", "width": 3, "max_depth": 3, "num_speculative_tokens": 6}
    return with_config({"method": "dovetail", **drafts, **options}, target=model, max_num_seqs=3, max_rows_per_step=24)


def drafter_of(llm: LLM) -> DovetailDrafter:
    assert isinstance(llm.recipe.drafter, DovetailDrafter)
    return llm.recipe.drafter


def drafted(llm: LLM) -> list[tuple[int, int, int]]:
    """Of each prompt: steps, draft tokens, accepted ones."""
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY)
    found = [output.metrics for output in outputs]
    return [(each.num_steps, each.num_draft_tokens, each.num_accepted_tokens) for each in found]


# ------------------------------------------------------------------ here and on a thread


PLACES: dict[str, dict[str, Any]] = {
    "here": {},
    "here, another dtype": {"dtype": "bfloat16"},
    "thread": {"place": "thread"},
    "thread, another dtype": {"place": "thread", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("place", PLACES)
def test_the_text_is_that_of_plain_decoding(place: str, model: LanguageModel, plain: list[list[int]]) -> None:
    llm = engine(model, **PLACES[place])
    assert texts(llm) == plain
    assert_idle(llm)
    assert sum(each[1] for each in drafted(llm)) > 150
    llm.close()
    assert texts(llm) == plain  # closed, it begins again


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lane_drafts_what_would_be_drafted_here(temperature: float, model: LanguageModel) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    found = []
    for options in ({}, {"place": "thread"}):
        llm = engine(model, **options)
        found.append((texts(llm, params), drafted(llm)))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_late_orders_and_answers_change_nothing(
    temperature: float, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the drafts: rows are read in their order, however late."""
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    here = engine(model)
    expected = texts(here, params), drafted(here)
    llm = engine(model, place="thread")
    slowly(monkeypatch, 4)
    delays = delays_at.at_every_hand_over(monkeypatch, 5)
    assert (texts(llm, params), drafted(llm)) == expected
    assert delays[0] > 50
    llm.close()


def test_a_missing_gpu_is_reported_once(model: LanguageModel, plain: list[list[int]]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    llm = engine(model, device="cuda")
    assert drafter_of(llm).explanation == "device=cuda: there is no GPU here, the head runs on the CPU"
    assert texts(llm) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["here", "thread"])
def test_the_head_runs_on_a_gpu(place: str, model: LanguageModel, plain: list[list[int]]) -> None:
    llm = engine(model, device="cuda", place=place)
    assert texts(llm) == plain
    assert drafter_of(llm).lane.bytes_moved > 1000
    llm.close()


def slowly(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Copies are late by a random time, on whatever thread makes them."""
    take, draw = staging.Staged.take, random.Random(seed)

    def late(self: staging.Staged) -> list[Tensor]:
        time.sleep(draw.uniform(0.0, 0.01))
        return take(self)

    monkeypatch.setattr(staging.Staged, "take", late)


def handed_over(model: LanguageModel) -> list[list[Tensor]]:
    """What the drafting side was given of each request, by a thread that is slow."""
    llm = engine(model, place="thread")
    lane = drafter_of(llm).lane
    assert isinstance(lane, OnThread)
    found, take = dict[int, list[Tensor]](), lane.remote_head.take

    def keep(parcels: Sequence[remote_head.Parcel]) -> None:
        for each in parcels:
            found.setdefault(each.request_id, []).append(each.states_TW.clone())
        take(parcels)

    lane.remote_head.take = keep  # type: ignore[method-assign]
    texts(llm)
    llm.close()
    return [found[number] for number in sorted(found)]


def equal(left: list[list[Tensor]], right: list[list[Tensor]]) -> bool:
    rows = [[torch.cat(each) for each in side] for side in (left, right)]
    return all(len(a) == len(b) and torch.equal(a, b) for a, b in zip(*rows, strict=True))


def test_late_copies_change_nothing(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    in_time = handed_over(model)
    slowly(monkeypatch, 1)
    assert equal(handed_over(model), in_time)


def test_a_single_buffer_without_waiting_is_detected(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the next chunk of a prompt is written over one that is still being copied."""
    in_time = handed_over(model)
    monkeypatch.setattr(staging, "_BUFFERS", 1)
    monkeypatch.setattr(Staging, "_wait", lambda self, buffer: None)
    slowly(monkeypatch, 1)
    assert not equal(handed_over(model), in_time)


def test_a_full_buffer_is_waited_for() -> None:
    """Two are put at once; the third waits until the first was taken."""
    stage, done = Staging(WIDTH, torch.float32, torch.device("cpu")), list[int]()
    first = stage.put([torch.full((2, WIDTH), 1.0), torch.full((1, WIDTH), 2.0)])
    second = stage.put([torch.full((3, WIDTH), 3.0)])

    def put() -> None:
        stage.put([torch.full((5, WIDTH), 4.0)])
        done.append(1)

    third = threading.Thread(target=put)
    third.start()
    third.join(0.05)
    assert not done
    one, two = first.take()
    third.join(5.0)
    assert done
    assert one.shape == (2, WIDTH)
    assert (float(one.max()), float(two.max()), float(second.take()[0].max())) == (1.0, 2.0, 3.0)
    assert stage.num_bytes == 11 * WIDTH * 4


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("place", ["here, another dtype", "thread"])
def test_bytes_are_those_of_the_rows_ids_and_nodes(place: str, model: LanguageModel) -> None:
    """Every row of prompt and text but the last, once; every id; every node that came back."""
    llm = engine(model, **PLACES[place])
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY)
    lane = drafter_of(llm).lane
    assert isinstance(lane, InPlace | OnThread)
    assert lane._staging is not None
    nodes = sum(output.metrics.num_draft_tokens for output in outputs)
    told = sum(len(prompt) for prompt in PROMPTS)
    ids = lane.bytes_moved - lane._staging.num_bytes - 12 * nodes
    assert ids % 8 == 0
    assert told < ids // 8 < told + 24 * len(PROMPTS)
    assert sum(output.metrics.num_moved_bytes for output in outputs) == lane.bytes_moved
    row = WIDTH * (2 if "dtype" in place else 4)
    assert lane._staging.num_bytes == row * (ids // 8 - len(PROMPTS))  # the root's row is not there yet
    llm.close()


def test_nothing_moves_where_the_target_is(model: LanguageModel) -> None:
    llm = engine(model)
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
    assert (outputs[0].metrics.num_moved_bytes, drafter_of(llm).lane.bytes_moved) == (0, 0)


# ------------------------------------------------------------------ requests come and go


def test_a_request_that_is_cancelled_while_the_lane_reads_leaves_nothing(
    model: LanguageModel, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request gets its slot, and drafts the same tokens as alone."""
    alone = engine(model, place="thread")
    expected = drafted(alone)
    alone.close()
    slowly(monkeypatch, 3)
    llm = engine(model, place="thread")
    lane = drafter_of(llm).lane
    assert isinstance(lane, OnThread)
    for steps in (1, 2, 4):  # in the middle of a long prompt, and of its answer
        (request,) = llm.new_requests({"prompt_token_ids": tokens_of(9, 60, 100)}, GREEDY)
        llm.engine.add(request)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.cancel(request)
    assert drafted(llm) == expected
    assert texts(llm) == plain
    assert_idle(llm)
    llm.close()
    assert not len(lane.remote_head._pending)


def test_rows_that_do_not_follow_are_not_read(model: LanguageModel) -> None:
    """A request with a gap in its rows or tokens gets no draft, and does not stop others."""
    head = random_part(Dovetail, model, layers=1)
    side = remote_head.RemoteHead(DovetailDrafter.Config(), model, head)
    side.take(
        [
            remote_head.Parcel(1, 0, torch.zeros(3, WIDTH), 0, (5, 6, 7, 8)),
            remote_head.Parcel(2, 4, torch.zeros(1, WIDTH), 5, (9,)),
        ]
    )
    assert (side.told(1), side.told(2)) == ([5, 6, 7, 8], [])
    side.take([remote_head.Parcel(1, 4, torch.zeros(1, WIDTH), 4, (9,))])  # row 3 is missing
    assert side.told(1) == []
    assert not len(side._pending)


# ------------------------------------------------------------------ a process


@pytest.fixture(scope="module")
def helped(model: LanguageModel) -> Iterator[LLM]:
    """One helper for the tests that leave it alive: it takes seconds to start."""
    llm = engine(model, place="process")
    yield llm
    llm.close()


def helper_of(llm: LLM) -> InProcess:
    lane = drafter_of(llm).lane
    assert isinstance(lane, InProcess)
    return lane


def test_a_process_drafts_the_same(helped: LLM, model: LanguageModel, plain: list[list[int]]) -> None:
    assert texts(helped) == plain
    here = engine(model)
    assert drafted(helped) == drafted(here)
    assert_idle(helped)


def test_a_process_with_late_input_drafts_the_same(
    helped: LLM, model: LanguageModel, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = delays_at.at_every_hand_over(monkeypatch, 6)
    assert texts(helped) == plain
    assert drafted(helped) == drafted(engine(model))
    assert delays[0] > 30


def test_bytes_are_those_of_the_pipe(helped: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, sent = helper_of(helped), list[int]()
    pipe = lane.helper._pipe
    assert pipe is not None
    send, receive = pipe.send_bytes, pipe.recv_bytes
    monkeypatch.setattr(pipe, "send_bytes", lambda each: (sent.append(len(each)), send(each)), raising=False)
    monkeypatch.setattr(pipe, "recv_bytes", lambda: (found := receive(), sent.append(len(found)))[0], raising=False)
    before = lane.bytes_moved
    outputs = helped.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY)
    assert lane.bytes_moved - before == sum(sent)
    assert sum(output.metrics.num_moved_bytes for output in outputs) == sum(sent)
    rows = sum(len(each) + 24 for each in PROMPTS)
    assert rows * WIDTH * 4 * 0.8 < sum(sent) < 3 * rows * WIDTH * 4


@pytest.mark.full_product
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow)],
)
def test_a_helper_that_is_lost_ends_no_request(
    number: int,
    model: LanguageModel,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the middle of a step: the text goes on without drafts. After a second loss this process drafts."""
    monkeypatch.setattr(process, "_LEAST", 0.3)
    llm = engine(model, place="process")
    lane, forward, num_steps = helper_of(llm), llm.engine.forward, 0
    lost: list[int | None] = []

    def failing(current: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (4, 40):
            assert lane.helper.ready(300.0)
            lost.append(lane.helper.pid)
            assert lost[-1] is not None
            os.kill(lost[-1], number)
        forward(current)

    llm.engine.forward = failing  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        while len(lost) < 2:
            assert texts(llm) == plain
        assert texts(llm) == plain
    assert [f"helper process {pid}" in caplog.text for pid in lost] == [True, True]
    assert "another one is started" in caplog.text
    assert "drafts are written in this process from now on" in caplog.text
    assert lane.helper.pid is None
    assert drafted(llm) == drafted(engine(model))
    assert_idle(llm)
    llm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place": "moon"}, "place='moon'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"budget": "some"}, "budget='some'"),
        ({"place": "process", "tree": False}, "tree=false with place='process' on cpu: a chain would"),
        ({"dtype": "bfloat16", "draft_vocab": "DIR"}, "has a vocabulary of its own, of 60 tokens"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str, model: LanguageModel) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(model, **options)
    assert message in str(caught.value)
