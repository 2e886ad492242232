"""What ``/metrics`` shows, under vLLM's names, so that dashboards made for it work here.

Counters are read from the loop when somebody looks; histograms are filled once a request.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.serve.loop import EngineLoop, Ticket

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


class Timings:
    """How long requests took, in a registry of their own.

    Args:
        name: what clients call the model; a label of every number.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        mean = "Mean seconds between tokens of a request, after the first."
        self._between = self._histogram("inter_token_latency_seconds", mean, _BETWEEN)
        self._per_token = self._histogram("request_time_per_output_token_seconds", mean, _BETWEEN)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to a slot.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From a slot to the first token.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "From a slot to the last token.", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def count(self, ticket: Ticket) -> None:
        """Take in a ticket that has ended by itself; one that was cancelled has no length of its own."""
        if ticket.ended is None or ticket.first_token is None:
            return
        first, whole = ticket.first_token - ticket.submitted, ticket.ended - ticket.submitted
        queued = min(first, max(0.0, ticket.requests[0].admitted - ticket.requests[0].started))
        self._first.observe(first)
        self._whole.observe(whole)
        self._queue.observe(queued)
        self._prefill.observe(first - queued)
        self._decode.observe(whole - first)
        self._inference.observe(whole - queued)
        for request in ticket.requests:
            self._prompt.observe(request.num_prompt)
            self._output.observe(request.num_output)
        longest = max(request.num_output for request in ticket.requests)
        if longest > 1:
            self._between.observe((whole - first) / (longest - 1))
            self._per_token.observe((whole - first) / (longest - 1))

    def _histogram(self, name: str, what: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(
            f"vllm:{name}", what, labelnames=("model_name",), buckets=tuple(buckets), registry=self.registry
        )
        labelled: Histogram = family.labels(model_name=self._name)
        return labelled


class LoopCollector(Collector):
    """The loop's own numbers, at the moment of looking.

    Args:
        loop: of the model.
        name: what clients call the model; a label of every number.
    """

    def __init__(self, loop: EngineLoop, name: str) -> None:
        self._loop = loop
        self._name = name

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        loop, totals = self._loop, self._loop.totals
        cache = loop.llm.engine.cache
        used = sum(cache.lengths) / (cache.max_slots * cache.max_length)
        yield self._gauge("num_requests_running", "Requests that have a slot.", loop.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", loop.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's rows that are taken, 1 is all.", used)
        yield self._counter("prompt_tokens", "Tokens of prompts.", totals.prompt_tokens)
        yield self._counter("prefix_cache_queries", "Tokens of prompts that were looked for.", totals.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Tokens of prompts that were reused.", totals.cached_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", totals.tokens)
        yield self._counter("spec_decode_num_drafts", "Drafts that were verified.", totals.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.", totals.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that stood.", totals.accepted_tokens)
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that stood to this position.",
            labels=("model_name", "position"),
        )
        for depth, count in enumerate(list(totals.accepted_at)):
            accepted.add_metric((self._name, str(depth)), count)
        yield accepted
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=("model_name", "finished_reason")
        )
        for reason, count in dict(totals.ended).items():
            ended.add_metric((self._name, reason), count)
        yield ended
        per_step = totals.tokens / totals.steps if totals.steps else 0.0
        share = totals.accepted_tokens / totals.draft_tokens if totals.draft_tokens else 0.0
        yield self._gauge(
            "tokens_per_step", "Tokens a target call and request, since the start.", per_step, "foretoken"
        )
        yield self._gauge("acceptance_rate", "Accepted tokens over drafted ones.", share, "foretoken")

    def _gauge(self, name: str, what: str, value: float, space: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{space}:{name}", what, labels=("model_name",))
        family.add_metric((self._name,), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", what, labels=("model_name",))
        family.add_metric((self._name,), value)
        return family


def exposition(registry: CollectorRegistry) -> bytes:
    """All of a registry in Prometheus' text format."""
    return generate_latest(registry)
