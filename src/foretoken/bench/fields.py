"""JSON fields that all interfaces share, each computed in one place from :class:`~foretoken.core.metrics.Metrics`."""

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from foretoken.core.metrics import Metrics


def finite(value: float) -> float | None:
    """Return the number, or None (null in JSON) if it is infinite or NaN, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """Return the median and the 99th percentile (nearest rank); None without values."""
    ranked = sorted(values)
    if not ranked:
        return None
    return {"p50": median(ranked), "p99": ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]}


def metrics_fields(metrics: Metrics) -> dict[str, Any]:
    """Return counters and times under the names of ``generate --json`` and ``bench --json``."""
    return {
        "seconds": metrics.seconds,
        "num_tokens": metrics.num_tokens,
        "tokens_per_second": metrics.tokens_per_second,
        "num_steps": metrics.num_steps,
        "tokens_per_step": metrics.tokens_per_step,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "num_discarded_tokens": metrics.num_discarded_tokens,
        "num_moved_bytes": metrics.num_moved_bytes,
        "acceptance_by_position": metrics.acceptance_by_position,
        "drafted_by_source": metrics.drafted_by_source,
        "accepted_by_source": metrics.accepted_by_source,
        "time": {"draft": metrics.draft_seconds, "verify": metrics.verify_seconds, "other": metrics.other_seconds},
        "distortion": finite(metrics.distortion),
        "kl": finite(metrics.kl),
        "experts_per_step": metrics.experts_per_step,
        "prefix_read": metrics.prefix_read,
    }
