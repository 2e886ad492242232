"""One LLM, several threads that generate and stream at once: each gets the same as alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, with_config

DRAFT = {"method": "draft_model", "model": "zoo:draft"}


def plan(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def together(*works: Callable[[], None]) -> None:
    """Run every piece of work in its own thread; exceptions are raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("config", [None, DRAFT, {"method": "suffix"}], ids=["none", "draft_model", "suffix"])
def test_threads_that_generate_and_stream_lose_nothing(config):
    llm = with_config(config, max_num_seqs=3, max_rows_per_step=40)
    generated: dict[int, tuple[list, list]] = {}
    streamed: dict[int, tuple[list[int], str, str]] = {}

    def generate(number: int) -> Callable[[], None]:
        def work() -> None:
            seen: list = []
            lengths = [3 + (number + index) % 4 * 7 for index in range(len(PROMPTS))]
            outputs = llm.generate(PROMPTS, [plan(length) for length in lengths], progress=seen.append)
            generated[number] = outputs, seen
            for prompt, length, output in zip(PROMPTS, lengths, outputs, strict=True):
                assert output.token_ids == greedy(prompt)[:length]

        return work

    def stream(number: int) -> Callable[[], None]:
        def work() -> None:
            chunks = list(llm.stream(PROMPTS[number], plan(30)))
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            streamed[number] = tokens, "".join(chunk.text for chunk in chunks), chunks[-1].output.text

        return work

    together(*(generate(number) for number in range(4)), *(stream(number) for number in range(3)))
    assert len(generated) == 4
    for outputs, seen in generated.values():
        # every output was reported once, whoever's step ended it, and whole
        assert sorted(each.token_ids for each in seen) == sorted(each.token_ids for each in outputs)
        assert {each.finish_reason for each in seen} == {"length"}
        assert all(each.metrics.num_tokens == len(each.token_ids) for each in seen)
    assert len(streamed) == 3
    for number, (tokens, text, whole) in streamed.items():
        assert tokens == greedy(PROMPTS[number])[:30]
        assert text == whole
    assert_idle(llm)


def test_threads_get_requests_of_their_own():
    """An id that two requests share would mix up what a drafter knows of them."""
    llm = with_config(None)
    found: list[int] = []
    together(*[lambda: found.extend(r.request_id for _ in range(200) for r in llm.new_requests([5], plan(1)))] * 4)
    assert len(set(found)) == len(found) == 800


def test_progress_comes_although_a_stream_ended_the_requests():
    """Steps that are taken for a stream in between may end requests of a `generate` that is under way."""
    llm = with_config(None)
    seen: list = []
    ended_by_stream: list[list[int]] = []

    def report(output) -> None:
        seen.append(output)
        if len(seen) == 1:  # a stream inside of the callback runs all requests, to their ends
            ended_by_stream.append([t for chunk in llm.stream(PROMPTS[3], plan(30)) for t in chunk.token_ids])

    outputs = llm.generate(PROMPTS[:3], [plan(2), plan(9), plan(14)], progress=report)
    assert ended_by_stream == [greedy(PROMPTS[3])[:30]]
    assert [len(each.token_ids) for each in seen] == [2, 9, 14]
    assert seen == outputs
    assert_idle(llm)
