"""The thread that owns the engine: its updates, and the ways in which requests end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken import AsyncLLM
from foretoken.engine.llm import LLM
from foretoken.engine.updates import Update
from foretoken.options.sampling import SamplingParams
from foretoken.serve.loop import EngineLoop, Overloaded, Stopped, Ticket
from helpers.zoo_llms import PROMPTS, assert_idle, base, with_config

ENDLESS = SamplingParams(max_tokens=3500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
ENDS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    # a fixed length: acceptance then depends on the text, not on the load of the machine
    return with_config({"method": "suffix", "num_speculative_tokens": 6}, max_num_seqs=2)


@pytest.fixture
def loop(llm: LLM) -> Iterator[EngineLoop]:
    loop = EngineLoop(llm, max_queue=3).start()
    yield loop
    loop.close()
    assert not loop.alive
    assert_idle(llm)


async def read(ticket: Ticket) -> dict[int, Update]:
    whole: dict[int, Update] = {}
    async for deltas in ticket.deltas():
        for delta in deltas:
            if delta.index in whole:
                whole[delta.index].join(delta)
            else:
                whole[delta.index] = delta
    return whole


async def ended(loop: EngineLoop, llm: LLM, params: SamplingParams) -> Ticket:
    """A streamed ticket that has been read to its end."""
    ticket = loop.submit(llm.new_requests(PROMPTS[0], params))
    await read(ticket)
    return ticket


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), 120)

    return asyncio.run(bounded())


def test_streamed_pieces_equal_generate(loop: EngineLoop, llm: LLM) -> None:
    prompts = PROMPTS[:4]
    params = SamplingParams(max_tokens=20, logprobs=1, temperature=0.7, seed=3, n=2)

    async def work() -> list[dict[int, Update]]:
        tickets = [loop.submit(llm.new_requests(prompt, params)) for prompt in prompts[:2]]
        return await asyncio.gather(*map(read, tickets))

    found = run(work)
    for pieces, output in zip(found, base().generate(list(prompts[:2]), params), strict=True):
        for index, wanted in enumerate(output.outputs):
            whole = pieces[index]
            assert (whole.text, whole.token_ids, whole.finish_reason) == (
                wanted.text,
                wanted.token_ids,
                wanted.finish_reason,
            )
            assert wanted.logprobs is not None
            assert [each.token_id for each in whole.logprobs] == whole.token_ids
            assert len(whole.drafted) == len(whole.token_ids)
    assert loop.totals.tokens == sum(len(each.token_ids) for pieces in found for each in pieces.values())
    assert loop.totals.accepted_tokens == sum(sum(each.drafted) for pieces in found for each in pieces.values())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """The updates of each reader."""
    every: list[Update] = []
    take_in = Ticket.take_in

    def noted(ticket: Ticket, delta: Update) -> None:
        copied = {name: [*getattr(delta, name)] for name in ("token_ids", "drafted", "sources", "refused")}
        every.append(replace(delta, **copied))
        take_in(ticket, delta)

    monkeypatch.setattr(Ticket, "take_in", noted)
    return every


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps last a second."""
    seconds = [time.monotonic()]
    step = llm.engine.step

    def a_second_long() -> Any:
        seconds[0] += 1.0
        return step()

    monkeypatch.setattr(llm.engine, "step", a_second_long)
    monkeypatch.setattr("foretoken.serve.loop.monotonic", lambda: seconds[0])


@pytest.mark.usefixtures("slow")
def test_a_single_stream_is_notified_of_every_long_step(loop: EngineLoop, llm: LLM, told: list[Update]) -> None:
    ticket: Ticket = run(lambda: ended(loop, llm, ENDS))
    assert [len(each.token_ids) for each in told] == [each.tokens for each in ticket.requests[0].metrics.emitted]
    assert loop.totals.steps == len(told)


@pytest.mark.usefixtures("slow")
def test_a_single_stream_is_notified_of_short_steps_together(
    loop: EngineLoop, llm: LLM, told: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.serve.loop._PAUSE", 3.0)
    monkeypatch.setattr("foretoken.serve.loop._LONGEST_PAUSE", 1000.0)
    ticket: Ticket = run(lambda: ended(loop, llm, ENDS))
    sizes = [each.tokens for each in ticket.requests[0].metrics.emitted]
    pieces = [len(each.token_ids) for each in told]
    assert pieces[0] == sizes[0]
    assert sum(pieces) == sum(sizes)
    assert len(pieces) <= len(sizes) // 3 + 3


def test_streams_are_notified_together_between_their_beginning_and_end(
    loop: EngineLoop, llm: LLM, told: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.serve.loop._PAUSE", 1000.0)
    monkeypatch.setattr("foretoken.serve.loop._LONGEST_PAUSE", 1000.0)
    ticket: Ticket = run(lambda: ended(loop, llm, replace(ENDS, n=2, temperature=1.0, seed=1)))
    first_end = next(place for place, each in enumerate(told) if each.finish_reason is not None)
    assert [(each.index, len(each.token_ids)) for each in told[:first_end]] == [(0, 1), (1, 1)]
    for index, request in enumerate(ticket.requests):
        ours = [each for each in told if each.index == index]
        assert [token for each in ours for token in each.token_ids] == request.output_ids
        assert "".join(each.text for each in ours) == base().tokenizer.decode(
            request.output_ids, skip_special_tokens=True
        )


@pytest.mark.usefixtures("slow")
def test_streams_are_notified_again_after_a_pause(
    loop: EngineLoop, llm: LLM, told: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.serve.loop._PAUSE", 1.0)
    monkeypatch.setattr("foretoken.serve.loop._PAUSE_MORE", 2.0)
    monkeypatch.setattr("foretoken.serve.loop._LONGEST_PAUSE", 1000.0)
    ticket: Ticket = run(lambda: ended(loop, llm, replace(ENDS, n=2, temperature=1.0, seed=1)))
    first_end = next(place for place, each in enumerate(told) if each.finish_reason is not None)
    sizes = [each.tokens for each in ticket.requests[0].metrics.emitted]
    again = [len(each.token_ids) for each in told[:first_end] if each.index == 0][2:]
    begun = sum(len(each.token_ids) for each in told[: first_end - 2 * len(again)] if each.index == 0)
    first = next(place for place in range(len(sizes)) if sum(sizes[:place]) == begun)
    assert again == [sum(sizes[place : place + 3]) for place in range(first, first + 3 * len(again), 3)]
    assert len(again) > 3


def test_a_request_without_streaming_is_woken_by_its_end_only(loop: EngineLoop, llm: LLM, told: list[Update]) -> None:
    async def work() -> tuple[Ticket, list[list[Update]]]:
        ticket = loop.submit(llm.new_requests(PROMPTS[0], ENDS), streamed=False)
        return ticket, [deltas async for deltas in ticket.deltas()]

    ticket, woken = run(work)
    assert [len(each.token_ids) for each in told] == [1, 39]
    assert [[each.token_ids for each in deltas] for deltas in woken] == [[ticket.requests[0].output_ids]]
    assert ticket.first_token < ticket.ended
    drafted = [place < step.drafted for step in ticket.requests[0].metrics.emitted for place in range(step.tokens)]
    assert woken[0][0].drafted == drafted
    assert any(drafted)


def test_a_reader_that_leaves_ends_its_request_within_a_step(loop: EngineLoop, llm: LLM) -> None:
    async def work() -> int:
        ticket = loop.submit(llm.new_requests(PROMPTS[0], ENDLESS))
        async for _ in ticket.deltas():
            break
        written = ticket.requests[0].num_output  # more than was delivered: the reader waits for a processor, too
        loop.cancel(ticket)
        while loop.num_running:
            await asyncio.sleep(0.001)
        return ticket.requests[0].num_output - written

    assert run(work) < 60
    assert loop.totals.ended == {"cancelled": 1}


def test_cancelled_before_it_began(loop: EngineLoop, llm: LLM) -> None:
    async def work() -> dict[int, Update]:
        ticket = loop.submit(llm.new_requests(PROMPTS[0], ENDLESS))
        loop.cancel(ticket)
        return await read(ticket)

    assert run(work)[0].finish_reason == "cancelled"


def test_a_full_queue_refuses_and_says_when_to_come_back(loop: EngineLoop, llm: LLM) -> None:
    async def work() -> None:
        tickets = [loop.submit(llm.new_requests(PROMPTS[0], ENDLESS)) for _ in range(2 + 3)]
        with pytest.raises(Overloaded, match="queue holds 3") as refused:
            loop.submit(llm.new_requests(PROMPTS[0], SHORT))
        assert 1.0 <= refused.value.retry_after <= 60.0
        loop.cancel(tickets[0])
        await read(tickets[0])
        last = loop.submit(llm.new_requests(PROMPTS[0], SHORT))
        for ticket in tickets:
            loop.cancel(ticket)
        assert len((await read(last))[0].token_ids) == 12

    run(work)


def test_draining_lets_what_runs_end_and_takes_no_more(llm: LLM) -> None:
    loop = EngineLoop(llm).start()

    async def work() -> None:
        ticket = loop.submit(llm.new_requests(PROMPTS[0], SHORT))
        loop.drain()
        with pytest.raises(Stopped, match="shutting down"):
            loop.submit(llm.new_requests(PROMPTS[1], SHORT))
        assert (await read(ticket))[0].finish_reason == "length"

    run(work)
    assert loop.close(seconds=10)


def test_closing_ends_what_runs_with_an_error(llm: LLM) -> None:
    loop = EngineLoop(llm).start()

    async def work() -> dict[int, Update]:
        ticket = loop.submit(llm.new_requests(PROMPTS[0], ENDLESS))
        async for _ in ticket.deltas():
            break
        assert not await asyncio.get_running_loop().run_in_executor(None, loop.close, 0.0)
        return await read(ticket)

    ended = run(work)[0]
    assert (ended.finish_reason, ended.error) == ("error", "the server is shutting down")
    assert_idle(llm)


def test_a_request_that_takes_too_long_ends(llm: LLM) -> None:
    loop = EngineLoop(llm, max_seconds=0.01).start()
    long = SamplingParams(max_tokens=3500, ignore_eos=True)  # seconds, and deadlines are looked at four times in one
    ended = run(lambda: read(loop.submit(llm.new_requests(PROMPTS[0], long))))
    assert loop.close(seconds=10)
    assert ended[0].error == "the request took longer than 0.01 seconds"
    assert ended[0].unserved


def test_a_dead_engine_is_reported_to_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(llm).start()
    monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)

    async def work() -> dict[int, Update]:
        ended = await read(loop.submit(llm.new_requests(PROMPTS[0], SHORT)))
        while loop.alive:
            await asyncio.sleep(0.001)
        with pytest.raises(Stopped, match="the engine has died: division by zero"):
            loop.submit(llm.new_requests(PROMPTS[0], SHORT))
        return ended

    assert run(work)[0].error == "the engine has died: division by zero"
    assert not loop.alive
    assert_idle(llm)


def test_a_loop_without_its_thread_refuses_requests(llm: LLM) -> None:
    """A process that was forked has the object, and not its thread; so has one that was not started."""
    loop = EngineLoop(llm)

    async def ask() -> None:
        with pytest.raises(Stopped, match="no thread of it runs in this process"):
            loop.submit(llm.new_requests(PROMPTS[0], SHORT))

    run(ask)


def test_a_closed_event_loop_harms_no_other_request(loop: EngineLoop, llm: LLM) -> None:
    async def leave() -> None:
        loop.submit(llm.new_requests(PROMPTS[0], ENDLESS))

    asyncio.run(leave())  # closes its event loop while the request runs
    found = run(lambda: read(loop.submit(llm.new_requests(PROMPTS[0], SHORT))))
    assert found[0].finish_reason == "length"
    deadline = time.monotonic() + 60
    while loop.num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.totals.ended.get("cancelled") == 1


def test_the_loop_shares_its_llm_with_direct_calls(loop: EngineLoop, llm: LLM) -> None:
    wanted = base().generate([PROMPTS[1]], SamplingParams(max_tokens=40))[0].token_ids
    found: list[list[int]] = []
    beside = threading.Thread(
        target=lambda: found.append(llm.generate([PROMPTS[1]], SamplingParams(max_tokens=40))[0].token_ids)
    )
    beside.start()
    ours = run(lambda: read(loop.submit(llm.new_requests(PROMPTS[1], SamplingParams(max_tokens=40)))))
    beside.join(timeout=60)
    assert found == [wanted]
    assert ours[0].token_ids == wanted


def test_the_asyncio_face() -> None:
    params = SamplingParams(max_tokens=16)
    wanted = base().generate(list(PROMPTS[:3]), params)

    async def work() -> None:
        async with AsyncLLM(with_config({"method": "suffix"})) as llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS[:3]))
            assert [each.token_ids for each in outputs] == [each.token_ids for each in wanted]
            text = ""
            async for delta in llm.stream(PROMPTS[0], params):
                text += delta.text
            assert text == wanted[0].text
            stream = llm.stream(PROMPTS[0], ENDLESS)
            await anext(stream)
            await stream.aclose()
            task = asyncio.ensure_future(llm.generate(PROMPTS[0], ENDLESS))
            while not llm.loop.num_running or llm.loop.totals.ended.get("cancelled") != 1:
                await asyncio.sleep(0.001)
            task.cancel()
            while llm.loop.totals.ended["cancelled"] != 2:  # the whole test has a time limit
                await asyncio.sleep(0.001)
            assert not llm.loop.num_running

    run(work)
