"""What an ``LLM`` has done since it was made, as numbers with vLLM's names (``LLM.get_metrics``)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.metrics import Metrics
from foretoken.engine.request import Request


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one for each position.

    Attributes:
        name: vLLM's.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """As it is now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters of draft positions, the first token of a draft first."""

    values: list[int]


class Totals:
    """Sums over requests that have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Metrics()
        self._prompt_tokens = self._cached_tokens = self._succeeded = 0

    def count(self, group: Sequence[Request]) -> None:
        """Take in the completions of one prompt; what was cancelled counts as far as it came."""
        with self._lock:
            self._prompt_tokens += group[0].num_prompt
            self._cached_tokens += group[0].num_cached
            for request in group:
                self._sum.add(request.metrics)
                self._succeeded += request.finish_reason in ("stop", "length")

    def metrics(self, running: int, waiting: int) -> list[Metric]:
        """All of them.

        Args:
            running, waiting: requests that do at the moment.
        """
        with self._lock:
            total = self._sum
            drafted = total.drafted_at
            return [
                Gauge("vllm:num_requests_running", running),
                Gauge("vllm:num_requests_waiting", waiting),
                Counter("vllm:request_success", self._succeeded),
                Counter("vllm:prompt_tokens", self._prompt_tokens),
                Counter("vllm:prefix_cache_hits", self._cached_tokens),
                Counter("vllm:generation_tokens", total.num_tokens),
                Counter("vllm:spec_decode_num_drafts", drafted[0] if drafted else 0),
                Counter("vllm:spec_decode_num_draft_tokens", total.num_draft_tokens),
                Counter("vllm:spec_decode_num_accepted_tokens", total.num_accepted_tokens),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(total.accepted_at)),
            ]
