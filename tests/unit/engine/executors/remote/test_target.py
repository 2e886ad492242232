"""A lane in a second process: the same text, whatever happens to that process, and none is left."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.core.draft import NO_DRAFT
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget
from foretoken.drafting import process
from foretoken.engine.executors.remote.helper import Order
from foretoken.engine.executors.remote.target import RemoteDrafter
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from helpers import delays as delays_at
from helpers import warm
from helpers.threads import one_thread
from helpers.zoo_llms import PROMPTS, assert_idle, base, ids, with_config

__all__ = ["one_thread"]

HELPED = {"method": "draft_model", "model": "zoo:draft", "executor": "pearl", "lane": "process"}
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def helper_of(llm: LLM) -> RemoteDrafter:
    assert isinstance(llm.recipe.drafter, RemoteDrafter)
    return llm.recipe.drafter


def alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(pid: int | None, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture(scope="module", autouse=True)
def helpers_begin_with_the_libraries_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(Popen=warm.Popen))
        yield


@pytest.fixture(scope="module")
def helped() -> Iterator[LLM]:
    """One helper for the tests that leave it alive: it takes seconds to start."""
    llm = with_config(HELPED)
    yield llm
    llm.close()


def test_the_text_is_that_of_plain_decoding(helped: LLM) -> None:
    assert ids(helped.generate(list(PROMPTS), GREEDY)) == ids(base().generate(list(PROMPTS), GREEDY))
    assert alive(helper_of(helped).pid)
    assert_idle(helped)
    outputs = helped.generate(list(PROMPTS), GREEDY)
    assert sum(each.metrics.num_accepted_tokens for each in outputs) > 40  # the helper's drafts stand


def test_orders_carry_the_tokens_that_are_new(helped: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, questions = helper_of(helped)._helper, []
    ask = helper.ask

    def watched(order: Order, **more: Any) -> Any:
        questions.extend(order.questions)
        return ask(order, **more)

    monkeypatch.setattr(helper, "ask", watched)
    (output,) = helped.generate(list(PROMPTS[:1]), GREEDY)
    assert output.metrics.num_accepted_tokens > 5
    first, *others = questions
    assert first.kept == 0
    assert all(each.kept >= first.num_prompt for each in others)
    assert sum(len(each.new) for each in others) <= 4 * GREEDY.max_tokens  # not the whole text again


def test_the_order_after_an_interrupted_one_carries_the_whole_text(
    helped: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper may have read the interrupted one, or not."""
    drafter, kept = helper_of(helped), []

    def ask(order: Order, **more: Any) -> Any:
        kept.append(order.questions[0].kept)
        if len(kept) == 2:
            raise KeyboardInterrupt
        return [NO_DRAFT]

    monkeypatch.setattr(drafter._helper, "ask", ask)
    facts = {"params": GREEDY, "streams": SimpleNamespace(seed=0), "stop_ids": (), "history_only": False}
    for tokens in ([5, 6, 7], [5, 6, 8], [5, 6, 7, 9], [5, 6, 7, 9, 2]):
        context: Any = SimpleNamespace(request_id=-1, tokens=tokens, num_prompt=2, **facts)
        with suppress(KeyboardInterrupt):
            drafter._ask([context], [Budget(1, 1)])
    drafter.release(-1)
    assert kept == [0, 2, 0, 4]


@pytest.mark.full_product
def test_the_text_is_the_same_with_late_messages_and_after_a_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every message late by a random time; then the helper is killed, and another one is started."""
    llm = with_config(HELPED)
    delays = delays_at.at_every_hand_over(monkeypatch, 1)
    expected = ids(base().generate(list(PROMPTS), GREEDY))
    first = helper_of(llm).pid
    with caplog.at_level(logging.WARNING):
        for lost in (False, True):
            if lost:
                assert first is not None
                os.kill(first, signal.SIGKILL)
                assert ids(llm.generate(list(PROMPTS[:1]), GREEDY)) == expected[:1]
                assert helper_of(llm).ready(300.0)
            outputs = llm.generate(list(PROMPTS), GREEDY)
            assert ids(outputs) == expected
            assert sum(each.metrics.num_accepted_tokens for each in outputs) > 40
    second = helper_of(llm).pid
    assert first != second
    assert delays[0] > 50
    assert "another one is started" in caplog.text
    assert_idle(llm)
    llm.close()
    assert gone_within(first, 2.0)
    assert gone_within(second, 2.0)


@pytest.mark.slow
def test_a_seed_keeps_its_stream_under_match() -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=11, top_p=0.9, repetition_penalty=1.2)
    llm = with_config({**HELPED, "tree": "coupled"})
    outputs = llm.generate(list(PROMPTS[:3]), params)
    assert ids(outputs) == ids(base().generate(list(PROMPTS[:3]), params))
    assert sum(each.metrics.num_accepted_tokens for each in outputs) > 10  # the noise is the target's, there, too
    llm.close()


def test_the_helper_releases_requests_that_ended(helped: LLM) -> None:
    stream = helped.stream(PROMPTS[0], GREEDY)
    next(stream)
    next(stream)
    stream.close()
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert ids(helped.generate(list(PROMPTS), params)) == ids(base().generate(list(PROMPTS), params))


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow)],
)
def test_a_helper_that_is_lost_ends_no_request(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a step. Another one is started; after a second loss this process drafts."""
    monkeypatch.setattr(process, "_LEAST", 0.3)
    llm = with_config(HELPED)
    drafter = helper_of(llm)
    lost: list[int | None] = []
    forward, num_steps = llm.engine.forward, 0

    def failing(current: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (4, 10):
            assert drafter.ready(300.0)
            lost.append(drafter.pid)
            if drafter.pid is not None:
                os.kill(drafter.pid, number)
        forward(current)

    llm.engine.forward = failing  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert ids(llm.generate(list(PROMPTS), GREEDY)) == ids(base().generate(list(PROMPTS), GREEDY))
    assert [f"helper process {pid}" in caplog.text for pid in lost] == [True, True]
    assert "another one is started" in caplog.text
    assert "drafts are written in this process from now on" in caplog.text
    assert drafter.pid is None
    assert all(gone_within(pid, 2.0) for pid in lost)
    outputs = llm.generate(list(PROMPTS), GREEDY)
    assert ids(outputs) == ids(base().generate(list(PROMPTS), GREEDY))
    assert sum(each.metrics.num_accepted_tokens for each in outputs) > 40
    llm.close()


@pytest.mark.slow
def test_closing_ends_the_process() -> None:
    llm = with_config(HELPED)
    pid = helper_of(llm).pid
    assert alive(pid)
    llm.close()
    assert gone_within(pid, 2.0)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert ids(llm.generate([PROMPTS[0]], params)) == ids(base().generate([PROMPTS[0]], params))  # in this process


PARENT = """
    import json, os, sys, threading
    import torch
    torch.set_num_threads(1)
    from foretoken import LLM, SamplingParams
    config = {"method": "draft_model", "model": "zoo:draft", "executor": "pearl", "lane": "process"}
    llm = LLM("zoo:base", dtype="float32", device="cpu", speculative_config=config)
    print(json.dumps({"pid": llm.recipe.drafter.pid}), flush=True)
    while True:
        llm.generate(["Once"], SamplingParams(max_tokens=200, ignore_eos=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_no_process_outlives_its_engine(number: int) -> None:
    """Killed, or ended by the keyboard, in the middle of an answer."""
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PARENT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())["pid"]
    assert alive(pid)
    time.sleep(0.5)
    os.killpg(parent.pid, number)  # as a terminal does: all processes of the group
    parent.wait(20)
    assert gone_within(pid, 2.0)
    parent.communicate()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"executor": "serial"}, "lane='process' does nothing with executor='serial'"),
        ({"lane": "gloo"}, "lane='gloo'"),
        ({"lane": "Process"}, r"lane='Process'.*'process'"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_config({**HELPED, **config})


def test_a_helper_that_hangs_while_it_starts_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STARTING", 0.2)
    asleep = tmp_path / "asleep"
    asleep.write_text("#!/bin/sh\nexec sleep 60\n")
    asleep.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(asleep))
    with pytest.raises(ConfigError, match="the helper did not start"):
        with_config(HELPED)


def test_a_helper_that_cannot_start_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="the helper did not start"):
        with_config(HELPED)
