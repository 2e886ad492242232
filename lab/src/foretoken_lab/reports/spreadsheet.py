"""The benchmark as comma-separated values: one row per setting, method and category, with the names of the JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.sheets import groups_of
from foretoken.bench.suite import Column, Section

_FACTS = ("model", "dtype", "device", "threads", "temperature", "max_tokens", "commit")
_SETTING = ("batch_size", "prompt_tokens", "method", "promise")
_FIGURES = (
    "num_prompts",
    "num_repeats",
    "failures",
    "speedup",
    "tokens_per_second",
    "tokens_per_step",
    "first_token_seconds",
    "decode_tokens_per_second",
    "decode_speedup",
    "num_tokens",
    "num_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "equal_outputs",
    "distortion",
)
_SPREAD = ("speedup", "tokens_per_second", "decode_speedup")
_LATENCY = {
    "first_token_seconds": ("p50", "p99"),
    "between_tokens_seconds": ("mean", "p50", "p99"),
    "answer_seconds": ("p50", "p99"),
}
_MEMORY = ("cache_bytes", "drafter_bytes")


def csv_lines(record: Mapping[str, Any], columns: Sequence[Column] = (), sections: Sequence[Section] = ()) -> str:
    """Return the whole file; unknown values are empty.

    Args:
        record: what ``foretoken bench --out`` writes: ``provenance`` and ``results``.
        columns, sections: additions of a suite; left out.
    """
    results, provenance = record["results"], record["provenance"]
    rows = [
        _row(result, name, figures, provenance) for result in results for name, figures in groups_of(result).items()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(
    result: Mapping[str, Any], category: str, figures: Mapping[str, Any], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {name: provenance.get(name) for name in _FACTS}
    row |= {name: result.get(name) for name in _SETTING}
    row["category"] = category
    row |= {name: figures.get(name) for name in _FIGURES}
    several = figures["num_repeats"] > 1
    for name in _SPREAD:
        low, high = (figures["spread"].get(name) if several else None) or (None, None)
        row[f"{name}_lowest"], row[f"{name}_highest"] = low, high
    latency = figures.get("latency") or {}
    for name, parts in _LATENCY.items():
        for part in parts:
            row[f"{name}_{part}"] = (latency.get(name) or {}).get(part)
    row |= {name: (result.get("memory") or {}).get(name) for name in _MEMORY}
    return row
