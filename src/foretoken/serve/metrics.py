"""The metrics of ``/metrics``, under vLLM's names, so that dashboards for vLLM work here.

Counters are read from the loop at each scrape; histograms get one value per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.serve.loop import EngineLoop, Ticket

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_MEAN = "Mean time between tokens of a request, after the first."
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": (_MEAN, _BETWEEN),
    "request_time_per_output_token_seconds": (_MEAN, _BETWEEN),
    "request_queue_time_seconds": ("Time from arrival to a slot.", _SECONDS),
    "request_prefill_time_seconds": ("Time from a slot to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("Time from a slot to the last token.", _SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_prompt_tokens": ("Number of prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Number of generated tokens of a request.", _TOKENS),
}


class Timings:
    """Histograms of the durations of requests, in a separate registry.

    Args:
        name: the model's name for clients; a label of every metric.
    """

    def __init__(self, name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # processor time and resident memory
        self._histograms: dict[str, Histogram] = {}
        for kind, (what, buckets) in _HISTOGRAMS.items():
            labels = ("model_name",)
            family = Histogram(f"vllm:{kind}", what, labelnames=labels, buckets=buckets, registry=self.registry)
            self._histograms[kind] = family.labels(model_name=name)
        ignored = Counter(
            "foretoken:ignored_fields",
            "Fields of requests that have no effect.",
            labelnames=("model_name",),
            registry=self.registry,
        )
        self._ignored: Counter = ignored.labels(model_name=name)

    def count_ignored(self, number: int) -> None:
        """Record fields that had no effect."""
        self._ignored.inc(number)

    def count(self, ticket: Ticket) -> None:
        """Record a ticket that ended normally; a cancelled one has no meaningful duration."""
        if ticket.ended is None or ticket.first_token is None:
            return
        first, whole = ticket.first_token - ticket.submitted, ticket.ended - ticket.submitted
        queued = min(first, max(0.0, ticket.requests[0].admitted - ticket.requests[0].started))
        observed = [
            ("time_to_first_token_seconds", first),
            ("e2e_request_latency_seconds", whole),
            ("request_queue_time_seconds", queued),
            ("request_prefill_time_seconds", first - queued),
            ("request_decode_time_seconds", whole - first),
            ("request_inference_time_seconds", whole - queued),
            *(("request_prompt_tokens", request.num_prompt) for request in ticket.requests),
            *(("request_generation_tokens", request.num_output) for request in ticket.requests),
        ]
        longest = max(request.num_output for request in ticket.requests)
        if longest > 1:
            mean = (whole - first) / (longest - 1)
            observed += [("inter_token_latency_seconds", mean), ("request_time_per_output_token_seconds", mean)]
        for name, value in observed:
            self._histograms[name].observe(value)


class LoopCollector(Collector):
    """Metrics of the loop at the time of a scrape.

    Args:
        loop: the model's loop.
        name: the model's name for clients; a label of every metric.
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
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's rows in use, from 0 to 1.", used)
        yield self._counter("prompt_tokens", "Prompt tokens.", totals.prompt_tokens)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.", totals.prompt_tokens
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens that were reused from the prefix cache.", totals.cached_tokens
        )
        yield self._counter("generation_tokens", "Tokens generated.", totals.tokens)
        yield self._counter("spec_decode_num_drafts", "Verified drafts.", totals.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", totals.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", totals.accepted_tokens)
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted up to this position.",
            ("position",),
            (((str(depth),), count) for depth, count in enumerate(list(totals.accepted_at))),
        )
        ended = (((reason,), count) for reason, count in dict(totals.ended).items())
        yield self._by("vllm:request_success", "Finished requests.", ("finished_reason",), ended)
        what = "Draft tokens by what proposed them, and whether they were accepted."
        yield self._by("foretoken:source_tokens", what, ("source", "outcome"), dict(totals.sources).items())
        off = (((code,), count) for code, count in dict(totals.off_steps).items())
        yield self._by("foretoken:speculation_off_steps", "Steps without a draft, by reason.", ("reason",), off)
        per_step = totals.tokens / totals.steps if totals.steps else 0.0
        share = totals.accepted_tokens / totals.draft_tokens if totals.draft_tokens else 0.0
        yield self._gauge(
            "tokens_per_step", "Tokens per target call and request, since the start.", per_step, "foretoken"
        )
        yield self._gauge("acceptance_rate", "Accepted draft tokens divided by drafted tokens.", share, "foretoken")

    def _gauge(self, name: str, what: str, value: float, space: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{space}:{name}", what, labels=("model_name",))
        family.add_metric((self._name,), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        return self._by(f"vllm:{name}", what, (), [((), value)])

    def _by(
        self, name: str, what: str, labels: Sequence[str], counts: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        family = CounterMetricFamily(name, what, labels=("model_name", *labels))
        for values, count in counts:
            family.add_metric((self._name, *values), count)
        return family


def exposition(registry: CollectorRegistry) -> bytes:
    """Render a registry in Prometheus' text format."""
    return generate_latest(registry)
