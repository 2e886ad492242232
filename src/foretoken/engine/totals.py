"""Counters over all requests of a driver, and vLLM's names for them (``LLM.get_metrics``)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.engine.request import Request
from foretoken.engine.updates import Tracked


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one for each position.

    Attributes:
        name: vLLM's.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """The present value of a number that rises and falls."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters of draft positions, the first token of a draft first."""

    values: list[int]


@dataclass(slots=True)
class Totals:
    """Counters; any thread may read them.

    Attributes:
        prompt_tokens, cached_tokens, tokens: tokens of prompts, those of them that were reused, and generated tokens.
        steps: (request, step) pairs that emitted tokens.
        drafts, draft_tokens, accepted_tokens: drafts that were verified, their tokens, and the accepted ones.
        accepted_at: drafts that were accepted to this depth.
        ended: finish reason -> requests.
        sources: (source, "accepted" or "rejected") -> draft tokens of requests that have ended.
        off_steps: code of the reason -> steps without a draft, of such requests.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    sources: dict[tuple[str, str], int] = field(default_factory=dict)
    off_steps: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count_prompt(self, group: Sequence[Request]) -> None:
        """Count the prompt of some completions, once."""
        with self._lock:
            self.prompt_tokens += group[0].num_prompt

    def count_progress(self, tracked: Tracked) -> None:
        """Count what a request has emitted since it was counted last."""
        metrics = tracked.request.metrics
        with self._lock:
            steps, tokens = len(metrics.emitted), metrics.num_tokens
            self.steps += steps - tracked.steps_counted
            self.tokens += tokens - tracked.num_counted
            self.draft_tokens += metrics.num_draft_tokens - tracked.drafted
            self.accepted_tokens += metrics.num_accepted_tokens - tracked.accepted
            tracked.num_counted, tracked.steps_counted = tokens, steps
            tracked.drafted, tracked.accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens

    def count_end(self, tracked: Tracked) -> None:
        """Count a request that has ended."""
        self.count_progress(tracked)
        request, metrics = tracked.request, tracked.request.metrics
        with self._lock:
            if tracked.index == 0:
                self.cached_tokens += request.num_cached
            reason = request.finish_reason or ""
            self.ended[reason] = self.ended.get(reason, 0) + 1
            for source, counts in metrics.by_source.items():
                rejected = counts["drafted"] - counts["accepted"]
                for outcome, count in (("accepted", counts["accepted"]), ("rejected", rejected)):
                    self.sources[source, outcome] = self.sources.get((source, outcome), 0) + count
            for code, count in metrics.off_steps.items():
                self.off_steps[code] = self.off_steps.get(code, 0) + count
            self.drafts += metrics.drafted_at[0] if metrics.drafted_at else 0
            self.accepted_at += [0] * (len(metrics.accepted_at) - len(self.accepted_at))
            for depth, count in enumerate(metrics.accepted_at):
                self.accepted_at[depth] += count

    def metrics(self, running: int, waiting: int) -> list[Metric]:
        """All of them, with vLLM's names.

        Args:
            running, waiting: requests that do at the moment.
        """
        with self._lock:
            return [
                Gauge("vllm:num_requests_running", running),
                Gauge("vllm:num_requests_waiting", waiting),
                Counter("vllm:request_success", self.ended.get("stop", 0) + self.ended.get("length", 0)),
                Counter("vllm:prompt_tokens", self.prompt_tokens),
                Counter("vllm:prefix_cache_hits", self.cached_tokens),
                Counter("vllm:generation_tokens", self.tokens),
                Counter("vllm:spec_decode_num_drafts", self.drafts),
                Counter("vllm:spec_decode_num_draft_tokens", self.draft_tokens),
                Counter("vllm:spec_decode_num_accepted_tokens", self.accepted_tokens),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(self.accepted_at)),
            ]
