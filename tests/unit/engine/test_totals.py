"""What an engine has done: sums over prompts and their completions, under the names that dashboards know."""

from __future__ import annotations

from foretoken.core.verdict import Verdict
from foretoken.engine.request import Request
from foretoken.engine.totals import Counter, Gauge, Totals, Vector
from foretoken.engine.updates import Tracked
from helpers.requests import make_request


def ended(reason: str, drafted: int, accepted: int) -> Request:
    """A request of five tokens, two of them read before, after one step."""
    request = make_request([3, 4, 5, 6, 7])
    request.num_cached, request.finish_reason = 2, reason
    request.metrics.count_step(Verdict(tuple(range(accepted)), 9), accepted + 1)
    request.metrics.count_draft(tuple(range(1, drafted + 1)), accepted)
    return request


def test_completions_are_summed_and_their_prompt_counts_once() -> None:
    totals = Totals()
    for group in ([ended("stop", 3, 2), ended("length", 1, 1), ended("cancelled", 2, 0)], [ended("error", 0, 0)]):
        totals.count_prompt(group)
        for index, request in enumerate(group):
            totals.count_end(Tracked(request, index))
    assert totals.metrics(7, 8) == [
        Gauge("vllm:num_requests_running", 7),
        Gauge("vllm:num_requests_waiting", 8),
        Counter("vllm:request_success", 2),
        Counter("vllm:prompt_tokens", 10),
        Counter("vllm:prefix_cache_hits", 4),
        Counter("vllm:generation_tokens", 3 + 2 + 1 + 1),
        Counter("vllm:spec_decode_num_drafts", 3),
        Counter("vllm:spec_decode_num_draft_tokens", 6),
        Counter("vllm:spec_decode_num_accepted_tokens", 3),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", [2, 1, 0]),
    ]


def test_nothing_has_been_done_at_first() -> None:
    values = [each for each in Totals().metrics(0, 0) if isinstance(each, Counter)]
    assert len(values) == 7
    assert {each.value for each in values} == {0}
