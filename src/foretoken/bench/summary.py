"""Figures from samples: medians over repeats, the spread between them, and failures.

Definitions, all over requests that did not fail:

* ``tokens_per_second``: tokens over wall time, all prompts of a repeat together (so long answers weigh more).
* ``speedup``: the method's tokens per second over the baseline's in the same repeat, on the prompts where neither
  failed. Below 1 is a slowdown.
* ``spread``: the lowest and the highest repeat; the figure itself is the median.
* ``first_token_seconds``, ``decode_tokens_per_second``, ``decode_speedup``: the prefill of a call until
  each prompt has its first token (mean, per prompt), and the same figures for the decoding after it.
* ``latency``: waiting times of a reader, from the queueing of a request; medians and 99th percentiles over all repeats.
  The tokens of a step arrive together: the first of them waits for the whole step, the others do not wait.
* ``observations_by_position``: number of drafts of that depth; ``acceptance_by_position`` is a share of it.
* ``counts``: the run's additional counters, per emitted token.
* ``equal_outputs``: share of (prompt, repeat) pairs with the same token ids as the baseline's.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from foretoken.bench.fields import metrics_fields, quantiles
from foretoken.bench.harness import BASELINE, Method, Records, Sample
from foretoken.core.metrics import Metrics

SLOWDOWN = 0.995  # print a smaller speed-up as below 1.00
_NUM_ERRORS = 5
_COUNTS = ("num_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens")


def summarise(records: Records, methods: Sequence[Method], promises: dict[str, str] | None = None) -> list[dict]:
    """Return one JSON-ready object per method, the baseline first, each with the same figures by category."""
    results = []
    baseline = [sample for sample in records.samples if sample.label == BASELINE]
    categories = list(dict.fromkeys(sample.prompt.category for sample in records.samples))
    for method in methods:
        samples = [sample for sample in records.samples if sample.label == method.label]
        results.append(
            {
                "method": method.label,
                "drafter": method.config["method"],
                "settings": method.settings,
                "promise": (promises or {}).get(method.label),
                **_figures(samples, baseline),
                "by_category": {
                    category: _figures(_of_category(samples, category), _of_category(baseline, category))
                    for category in categories
                },
                "errors": _first_errors(samples),
            }
        )
    return results


def _of_category(samples: Iterable[Sample], category: str) -> list[Sample]:
    return [sample for sample in samples if sample.prompt.category == category]


def _figures(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any]:
    good = [sample for sample in samples if sample.error is None]
    repeats = [_total(part) for part in _by_repeat(good)]
    pairs = _pairs(good, baseline)
    speedups = [_speed(own) / _speed(other) for own, other in _pairs_by_repeat(pairs) if _speed(other) > 0]
    total = _total(good)
    pooled = metrics_fields(total)
    repeated: dict[str, list[float]] = {
        "speedup": speedups,
        "seconds": [part.seconds for part in repeats],
        "tokens_per_second": [part.tokens_per_second for part in repeats],
        "tokens_per_step": [part.tokens_per_step for part in repeats],
    }
    decoding = _decoding(good, pairs)
    figures: dict[str, Any] = {
        "num_prompts": len({id(sample.prompt) for sample in samples}),
        "num_repeats": len(repeats),
        **{name: _middle(values) for name, values in repeated.items()},
        **{name: _whole(_middle([getattr(part, name) for part in repeats])) for name in _COUNTS},
        "acceptance_by_position": pooled["acceptance_by_position"],
        "observations_by_position": list(total.drafted_at),
        "drafted_by_source": pooled["drafted_by_source"],
        "accepted_by_source": pooled["accepted_by_source"],
        "time": {
            name: _middle([getattr(part, f"{name}_seconds") for part in repeats])
            for name in ("draft", "verify", "other")
        },
        "distortion": pooled["distortion"],
        "kl": pooled["kl"],
        "equal_outputs": sum(own.tokens == other.tokens for own, other in pairs) / len(pairs) if pairs else None,
        "failures": len(samples) - len(good),
    }
    if latency := _latency(good):
        figures["latency"] = latency
    if counts := _counts(good):
        figures["counts"] = counts
    figures |= {name: _middle(values) for name, values in decoding.items()}
    figures["spread"] = {name: _range(values) for name, values in (repeated | decoding).items()}
    return figures


def _counts(good: Sequence[Sample]) -> dict[str, float]:
    """Return the run's additional counters per token; empty if there are none."""
    num_tokens = sum(len(sample.tokens) for sample in good)
    names = dict.fromkeys(name for sample in good for name in sample.counts)
    return {name: sum(s.counts.get(name, 0.0) for s in good) / num_tokens for name in names} if num_tokens else {}


def _decoding(good: Sequence[Sample], pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, list[float]]:
    """Return the figures of prefill and decoding, one of each repeat; empty if unknown."""
    timed = [sample for sample in good if sample.first_token_seconds is not None]
    if not timed:
        return {}
    both = [pair for pair in pairs if None not in (pair[0].first_token_seconds, pair[1].first_token_seconds)]
    parts = _pairs_by_repeat(both)
    return {
        "first_token_seconds": [mean(s.first_token_seconds or 0.0 for s in part) for part in _by_repeat(timed)],
        "decode_tokens_per_second": [_decode_speed(part) for part in _by_repeat(timed)],
        "decode_speedup": [
            _decode_speed(own) / _decode_speed(other) for own, other in parts if _decode_speed(other) > 0
        ],
    }


def _decode_speed(samples: Sequence[Sample]) -> float:
    seconds = sum(sample.decode_seconds for sample in samples)
    return sum(sample.decode_tokens for sample in samples) / seconds if seconds > 0 else 0.0


def _latency(good: Sequence[Sample]) -> dict[str, Any] | None:
    """Return the waiting times of readers, in seconds; None if the engine did not record the times of tokens."""
    came = [sample.metrics.emitted for sample in good if sample.metrics.emitted]
    if not came:
        return None
    gaps: list[float] = []
    for steps in came:
        for before, step in pairwise(steps):
            gaps += [step.seconds - before.seconds, *[0.0] * (step.tokens - 1)]
        gaps += [0.0] * (steps[0].tokens - 1)
    between = quantiles(gaps)
    return {
        "first_token_seconds": quantiles(steps[0].seconds for steps in came),
        "between_tokens_seconds": None if between is None else {"mean": mean(gaps), **between},
        "answer_seconds": quantiles(steps[-1].seconds for steps in came),
        "num_answers": len(came),
        "num_gaps": len(gaps),
    }


def _total(samples: Iterable[Sample]) -> Metrics:
    """Sum the samples' counters, with the harness's clock and token counter in place of the engine's.

    The engine's three times stay; "other" is the remaining wall time (tokenization, set-up of the call).
    """
    total = Metrics()
    seconds = 0.0
    num_tokens = 0
    for sample in samples:
        total.add(sample.metrics)
        seconds += sample.seconds
        num_tokens += len(sample.tokens)
    total.seconds = seconds
    total.num_tokens = num_tokens
    total.other_seconds = max(seconds - total.draft_seconds - total.verify_seconds, 0.0)
    return total


def _by_repeat(samples: Iterable[Sample]) -> list[list[Sample]]:
    parts: dict[int, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.repeat, []).append(sample)
    return list(parts.values())


def _pairs(samples: Iterable[Sample], baseline: Iterable[Sample]) -> list[tuple[Sample, Sample]]:
    """Return pairs (the method's sample, the baseline's) of the same prompt and repeat without failures."""
    others = {(id(other.prompt), other.repeat): other for other in baseline if other.error is None}
    keys = ((sample, (id(sample.prompt), sample.repeat)) for sample in samples)
    return [(sample, others[key]) for sample, key in keys if key in others]


def _pairs_by_repeat(pairs: Sequence[tuple[Sample, Sample]]) -> list[tuple[list[Sample], list[Sample]]]:
    parts: dict[int, tuple[list[Sample], list[Sample]]] = {}
    for own, other in pairs:
        mine, theirs = parts.setdefault(own.repeat, ([], []))
        mine.append(own)
        theirs.append(other)
    return list(parts.values())


def _speed(samples: Sequence[Sample]) -> float:
    seconds = sum(sample.seconds for sample in samples)
    return sum(len(sample.tokens) for sample in samples) / seconds if seconds > 0 else 0.0


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _whole(value: float | None) -> float | None:
    return int(value) if value is not None and value == int(value) else value


def _range(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


def _first_errors(samples: Iterable[Sample]) -> list[dict[str, str]]:
    found: dict[str, str] = {}
    for sample in samples:
        if sample.error is not None:
            found.setdefault(sample.error, sample.prompt.id)
    pairs = list(found.items())[:_NUM_ERRORS]
    return [{"prompt": prompt_id, "error": error} for error, prompt_id in pairs]


def share_of_time(result: Mapping[str, Any]) -> dict[str, float]:
    """Return draft, verify and other as shares of their sum; empty without measurements."""
    parts = {name: value or 0.0 for name, value in result["time"].items()}
    whole = sum(parts.values())
    return {name: value / whole for name, value in parts.items()} if whole > 0 else {}
