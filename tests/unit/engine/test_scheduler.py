"""The scheduler: order of arrival, one row for every decoding request, prompts from the rest of the rows."""

from __future__ import annotations

import random

from foretoken.engine.request import Request
from foretoken.engine.scheduler import Scheduler, Work
from foretoken.forward.cache import KVCache
from helpers.requests import make_request


def scheduler(*lengths: int, slots: int = 4, max_rows: int = 16) -> tuple[Scheduler, list[Request]]:
    made = Scheduler(KVCache(1, slots, 1000), max_rows)
    requests = [make_request(range(length), max_tokens=5) for length in lengths]
    for request in requests:
        made.add(request)
    return made, requests


def run(made: Scheduler, work: Work) -> None:
    """What the engine does to the caches in one step; every request that is ready emits one token."""
    for request in work.decoding:
        made.cache.commit(request.slot, [0])
        request.accept([7])
    for request, count in work.prefill:
        last = made.cache.lengths[request.slot] + count == len(request.tokens)
        made.cache.commit(request.slot, range(count))
        if last:
            request.accept([7])
    for request in [*work.decoding, *(request for request, _ in work.prefill)]:
        if request.finished:
            made.remove(request)


def test_requests_join_in_order_of_arrival_while_slots_are_free():
    made, requests = scheduler(2, 2, 2, slots=2)
    work = made.next()
    assert [request for request, _ in work.prefill] == requests[:2]
    assert [request.slot for request in requests] == [0, 1, -1]
    assert [request.admitted > 0 for request in requests] == [True, True, False]
    made.remove(requests[0])
    work = made.next()
    assert requests[2].slot == 0
    assert requests[2].admitted > requests[1].admitted
    assert requests[2] in [request for request, _ in work.prefill]


def test_a_long_prompt_is_fed_in_chunks_and_never_stops_decoding_requests():
    made, (short, long) = scheduler(3, 40, max_rows=16)
    work = made.next()
    assert [(request, count) for request, count in work.prefill] == [(short, 3), (long, 13)]
    assert work.spare_rows == 0
    run(made, work)
    work = made.next()
    assert work.decoding == [short]
    assert work.prefill == [(long, 15)]
    run(made, work)
    work = made.next()
    assert work.prefill == [(long, 12)]
    assert work.spare_rows == 3


def test_of_prompts_that_come_at_once_the_first_is_answered_before_the_last_is_read():
    requests = [make_request(range(length), max_tokens=5) for length in (6, 5, 4, 30)]
    made = Scheduler(KVCache(1, 4, 1000), 100, enough=10)
    for request in requests:
        made.add(request)
    first, second, third, fourth = requests
    work = made.next()
    assert work.prefill == [(first, 6), (second, 5)]
    run(made, work)
    work = made.next()
    assert (work.decoding, work.prefill) == ([first, second], [(third, 4), (fourth, 30)])
    assert work.spare_rows == 64


def test_a_prompt_of_one_token_is_a_root_and_the_last_of_a_longer_one_is_not_however_it_was_cut():
    made, (single, other) = scheduler(1, 17, max_rows=17)
    work = made.next()
    assert work.decoding == [single]
    assert work.prefill == [(other, 16)]
    run(made, work)
    work = made.next()
    assert (work.decoding, work.prefill) == ([single], [(other, 1)])


def test_no_more_run_than_there_are_rows():
    made, requests = scheduler(4, 4, 4, slots=3, max_rows=2)
    made.next()
    assert len(made.running) == 2
    assert list(made.waiting) == requests[2:]


def test_waiting_and_running_requests_can_be_taken_out_once_and_again():
    made, (running, waiting) = scheduler(4, 4, slots=1)
    made.next()
    made.remove(waiting)
    made.remove(running)
    made.remove(running)
    assert not made.busy
    assert made.cache.free_slots == 1


def test_every_request_ends_and_no_step_exceeds_its_rows():
    rng = random.Random(0)
    for _ in range(30):
        slots, max_rows = rng.randint(1, 6), rng.randint(1, 20)
        made, requests = scheduler(*(rng.randint(1, 50) for _ in range(12)), slots=slots, max_rows=max_rows)
        for _ in range(2000):
            if not made.busy:
                break
            work = made.next()
            rows = len(work.decoding) + sum(count for _, count in work.prefill)
            assert 1 <= rows <= max_rows
            assert work.spare_rows == max_rows - rows
            assert len(made.running) <= min(slots, max_rows)
            run(made, work)
        assert all(request.finish_reason == "length" for request in requests)
        assert [request.num_output for request in requests] == [5] * 12
        assert made.cache.free_slots == slots


def test_rows_that_requests_have_for_their_drafts_are_not_fed_prompts():
    """Two that decode, with two and three rows of their own, next to a long prompt."""
    made, (one, other, long) = scheduler(1, 1, 40, max_rows=16)
    made.reserved = {one: 2, other: 3, long: 100}.__getitem__
    work = made.next()
    assert work.decoding == [one, other]
    assert work.prefill == [(long, 16 - 2 - 5)]
    assert work.spare_rows == 5
    made.reserved = {one: 7, other: 7, long: 100}.__getitem__
    assert made.next().prefill == []
    assert made.next().spare_rows == 14


def test_a_draft_may_begin_with_the_answer():
    """Then the last token of a prompt is not fed: it is the root of the first draft."""
    made = Scheduler(KVCache(1, 2, 1000), 16, drafted_first=True)
    short, long = make_request(range(4), max_tokens=5), make_request(range(20), max_tokens=5)
    made.add(short)
    made.add(long)
    work = made.next()
    assert work.prefill == [(short, 3), (long, 13)]
    for request, count in work.prefill:
        made.cache.commit(request.slot, range(count))
    work = made.next()
    assert work.decoding == [short]
    assert work.prefill == [(long, 6)]
