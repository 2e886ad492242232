"""The metrics of ``/metrics``, under vLLM's names, so that dashboards for vLLM work here.

Counters are read from the loop at each scrape; histograms get one value per request.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.engine.totals import Totals
from foretoken.serve.loop import EngineLoop, Ticket

_TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class Histograms:
    """The families of all models of a process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # processor time and resident memory
        labels = ("model_name",)
        self.families = {
            kind: Histogram(f"vllm:{kind}", what, labels, buckets=_TABLES["buckets"][of], registry=self.registry)
            for kind, (what, of) in _TABLES["histograms"].items()
        }
        what = "Fields of requests that have no effect."
        self.ignored = Counter("foretoken:ignored_fields", what, labelnames=labels, registry=self.registry)


class Timings:
    """The durations of one model's requests.

    Args:
        name: the model's name for clients; a label of every metric.
        histograms: of the process; None: new ones.
    """

    def __init__(self, name: str, histograms: Histograms | None = None) -> None:
        self.all = histograms or Histograms()
        self._histograms = {kind: family.labels(model_name=name) for kind, family in self.all.families.items()}
        self._ignored: Counter = self.all.ignored.labels(model_name=name)

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


class Counted(Protocol):
    """A model; its metrics are read at each scrape.

    Attributes:
        name: its name for clients; a label of every metric.
        totals: its counters.
        loop: None: it is not loaded.
    """

    name: str
    totals: Totals

    @property
    def loop(self) -> EngineLoop | None: ...


class LoopCollector(Collector):
    """Metrics of the models at the time of a scrape.

    Args:
        models: each has a sample in every metric.
    """

    def __init__(self, models: Sequence[Counted]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        families: dict[str, Any] = {}
        for model in self._models:
            for kind, name, what, labels, counts in _read(model.totals, model.loop):
                made = families.get(name) or kind(name, what, labels=("model_name", *labels))
                families[name] = made
                for values, count in counts:
                    made.add_metric((model.name, *values), count)
        return families.values()


_Count = tuple[tuple[str, ...], float]  # values of the labels, and the number
_Family = tuple[Any, str, str, tuple[str, ...], Iterable[_Count]]


def _read(totals: Totals, loop: EngineLoop | None) -> Iterator[_Family]:
    """Yield the metrics of one model: family, name, description, labels and counts."""
    used = 0.0
    if loop is not None:
        cache = loop.llm.engine.cache
        used = sum(cache.lengths) / (cache.max_slots * cache.max_length)
    running, waiting = (0, 0) if loop is None else (loop.num_running, loop.num_waiting)
    yield _gauge("vllm:num_requests_running", "Requests that have a slot.", running)
    yield _gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", waiting)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's rows in use, from 0 to 1.", used)
    yield _counter("prompt_tokens", "Prompt tokens.", totals.prompt_tokens)
    what = "Prompt tokens that were looked up in the prefix cache."
    yield _counter("prefix_cache_queries", what, totals.prompt_tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens that were reused from the prefix cache.", totals.cached_tokens)
    yield _counter("generation_tokens", "Tokens generated.", totals.tokens)
    yield _counter("spec_decode_num_drafts", "Verified drafts.", totals.drafts)
    yield _counter("spec_decode_num_draft_tokens", "Drafted tokens.", totals.draft_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", totals.accepted_tokens)
    depths = (((str(depth),), count) for depth, count in enumerate(list(totals.accepted_at)))
    what = "Drafts that were accepted up to this position."
    yield _by("vllm:spec_decode_num_accepted_tokens_per_pos", what, ("position",), depths)
    ended = (((reason,), count) for reason, count in dict(totals.ended).items())
    yield _by("vllm:request_success", "Finished requests.", ("finished_reason",), ended)
    what = "Draft tokens by what proposed them, and whether they were accepted."
    yield _by("foretoken:source_tokens", what, ("source", "outcome"), dict(totals.sources).items())
    off = (((code,), count) for code, count in dict(totals.off_steps).items())
    yield _by("foretoken:speculation_off_steps", "Steps without a draft, by reason.", ("reason",), off)
    per_step = totals.tokens / totals.steps if totals.steps else 0.0
    share = totals.accepted_tokens / totals.draft_tokens if totals.draft_tokens else 0.0
    yield _gauge("foretoken:tokens_per_step", "Tokens per target call and request, since the start.", per_step)
    yield _gauge("foretoken:acceptance_rate", "Accepted draft tokens divided by drafted tokens.", share)
    yield _gauge("foretoken:model_loaded", "1 while the model is in memory, else 0.", float(loop is not None))


def _gauge(name: str, what: str, value: float) -> _Family:
    return GaugeMetricFamily, name, what, (), [((), value)]


def _counter(name: str, what: str, value: float) -> _Family:
    return _by(f"vllm:{name}", what, (), [((), value)])


def _by(name: str, what: str, labels: tuple[str, ...], counts: Iterable[_Count]) -> _Family:
    return CounterMetricFamily, name, what, labels, counts


def exposition(registry: CollectorRegistry) -> bytes:
    """Render a registry in Prometheus' text format."""
    return generate_latest(registry)
