"""The results of a run as tables (table.py).

Every figure over all prompts is followed by the same figure by category.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretoken.bench.harness import BASELINE
from foretoken.bench.suite import Column, Section
from foretoken.bench.summary import SLOWDOWN, share_of_time
from foretoken.bench.table import DASH, Cell, Sheet, megabytes, milliseconds, number

MAX_DEPTH = 16  # maximum positions of a draft in a table
FEW = 20  # with fewer observations a share is unreliable
_EXACT = ("same text", "same stream")  # under "same distribution" the samples differ, so different tokens are correct


def sheets(
    results: Sequence[Mapping[str, Any]], columns: Sequence[Column] = (), sections: Sequence[Section] = ()
) -> list[Sheet]:
    """Return all tables of a run: a comparison for several settings, details for a single one.

    Args:
        results: what :func:`foretoken.bench.summary.summarise` returned, of one setting after the other.
        columns: a suite's additional counts.
        sections: a suite's own tables.
    """
    found: list[Sheet] = []
    if len(settings_of(results)) > 1:
        found.append(_grid(results))
    elif results:
        found += [_overall(results), _by_category(results)]
        if any(result.get("latency") for result in results):
            found.append(_latency(results))
        found.append(_costs(results))
        if any(result["acceptance_by_position"] for result in results):
            found.append(_acceptance(results))
    if columns and results:
        found.append(_counted(results, columns))
    return [*found, *(_section(each) for each in sections)]


def in_words(provenance: Mapping[str, Any]) -> str:
    """Describe the run in one line."""
    suite, memory = provenance["suite"], provenance.get("memory") or {}
    lengths = provenance.get("prompt_tokens")
    of_length = "" if lengths is None else f" of {_listed(lengths)} tokens"
    peak = memory.get("peak_resident_bytes")
    prompts, repeats = _num(suite["num_prompts"], "prompt"), _num(provenance["repeats"], "repeat")
    return (
        f"{provenance['model']} {provenance['dtype']}, {prompts}{of_length}, at most {provenance['max_tokens']} tokens "
        f"each, temperature {provenance['temperature']:g}, {repeats}, {_num(provenance['threads'], 'thread')}, batch "
        f"{_listed(provenance['batch_size'])}, {provenance['cpu']}"
        + ("" if peak is None else f"; at most {peak / 1e9:.2f} GB of memory")
    )


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _listed(value: Any) -> str:
    return ", ".join(str(each or "as is") for each in value) if isinstance(value, list) else str(value)


def settings_of(results: Iterable[Mapping[str, Any]]) -> list[tuple[int | None, int | None]]:
    """Return batch size and prompt length of every setting, in order; the length of unchanged prompts is None."""
    return list(dict.fromkeys((each.get("batch_size"), each.get("prompt_tokens")) for each in results))


def groups_of(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the figures over all prompts, followed by those by category if there are several."""
    categories = result["by_category"]
    return {"all": result, **categories} if len(categories) > 1 else {"all": result}


# ---------------------------------------------------------------------- the sheets


def _overall(results: Sequence[Mapping[str, Any]]) -> Sheet:
    return Sheet(
        "overview",
        "Tokens per step includes the token that every step adds, so plain decoding is 1.00. Accepted: of all draft "
        "tokens. Same tokens: answers equal to plain decoding's, which “same distribution” does not promise when "
        "sampling.",
        (
            "method",
            "speed-up",
            "lowest to highest",
            "tokens per second",
            "tokens per step",
            "accepted",
            "same tokens",
            "failed",
        ),
        [
            (
                Cell(result["method"]),
                speedup(result),
                Cell(spread(result)),
                number(result["tokens_per_second"], "{:.0f}"),
                number(result["tokens_per_step"]),
                _accepted(result),
                _equality(result),
                _failures(result),
            )
            for result in results
        ],
    )


def _by_category(results: Sequence[Mapping[str, Any]]) -> Sheet:
    rows = []
    for result in results:
        for name, figures in groups_of(result).items():
            first = figures.get("first_token_seconds")
            rows.append(
                (
                    Cell(result["method"] if name == "all" else ""),
                    Cell(name),
                    speedup(figures) if result["method"] != BASELINE else Cell(DASH),
                    Cell(spread(figures) if result["method"] != BASELINE else DASH),
                    number(None if first is None else 1e3 * first, "{:.1f}"),
                    number(figures.get("decode_tokens_per_second"), "{:.0f}"),
                    speedup(figures, "decode_speedup") if result["method"] != BASELINE else Cell(DASH),
                    number(figures["tokens_per_step"]),
                )
            )
    return Sheet(
        "speed-up by category, and decoding, apart from reading the prompt",
        "First token: the prefill time of a call, per prompt. The next three columns cover decoding only.",
        (
            "method",
            "category",
            "speed-up",
            "lowest to highest",
            "first token ms",
            "decoding tokens per second",
            "decoding speed-up",
            "tokens per step",
        ),
        rows,
        labels=2,
    )


def _latency(results: Sequence[Mapping[str, Any]]) -> Sheet:
    counts = [result["latency"] for result in results if result.get("latency")]
    answers, gaps = (sorted({each[name] for each in counts}) for name in ("num_answers", "num_gaps"))
    return Sheet(
        "what a reader waits for, milliseconds",
        "P50 and P99, from the queueing of a request. Tokens that are accepted together arrive together: the first of "
        "them waits for the whole step and the others do not wait, so a P50 between tokens may be 0; the mean is "
        f"decoding's. {_span(answers)} answers and {_span(gaps)} gaps of each method.",
        ("method", "first token P50", "P99", "between tokens mean", "P50", "P99", "whole answer P50", "P99"),
        [
            (
                Cell(result["method"]),
                *(
                    milliseconds((result.get("latency") or {}).get(name), each)
                    for name, each in (
                        ("first_token_seconds", "p50"),
                        ("first_token_seconds", "p99"),
                        ("between_tokens_seconds", "mean"),
                        ("between_tokens_seconds", "p50"),
                        ("between_tokens_seconds", "p99"),
                        ("answer_seconds", "p50"),
                        ("answer_seconds", "p99"),
                    )
                ),
            )
            for result in results
        ],
    )


def _costs(results: Sequence[Mapping[str, Any]]) -> Sheet:
    rows = []
    for result in results:
        shares, memory = share_of_time(result), result.get("memory") or {}
        rows.append(
            (
                Cell(result["method"]),
                *(number(100 * shares[part] if shares else None, "{:.0f}%") for part in ("draft", "verify", "other")),
                megabytes(memory.get("cache_bytes")),
                megabytes(memory.get("drafter_bytes")),
            )
        )
    return Sheet(
        "where time and memory go",
        "Time is drafting, the target's forward with the verification, and the rest. The target's keys and "
        "values, and what the drafter holds in tensors of its own: weights, keys and values, tables.",
        ("method", "draft", "verify", "other", "target's cache MB", "drafter MB"),
        rows,
    )


def _acceptance(results: Sequence[Mapping[str, Any]]) -> Sheet:
    drafting = [result for result in results if result["acceptance_by_position"]]
    deepest = max(min(len(result["acceptance_by_position"]), MAX_DEPTH) for result in drafting)
    rows = []
    for depth in range(deepest):
        cells = []
        for result in drafting:
            rates, counts = result["acceptance_by_position"], result["observations_by_position"]
            if depth < len(rates):
                cells.append(Cell(f"{rates[depth]:.2f} of {counts[depth]}", doubtful=counts[depth] < FEW))
            else:
                cells.append(Cell(DASH))
        rows.append((Cell(str(depth + 1)), *cells))
    return Sheet(
        "acceptance by position in the draft",
        "The share of steps that accepted the draft up to this position, among those that drafted so far; a share of "
        f"fewer than {FEW} is unreliable.",
        ("position", *(result["method"] for result in drafting)),
        rows,
    )


def _grid(results: Sequence[Mapping[str, Any]]) -> Sheet:
    rows = []
    last: tuple[Any, Any] | None = None
    for result in results:
        setting = (result.get("batch_size"), result.get("prompt_tokens"))
        latency, memory = result.get("latency") or {}, result.get("memory") or {}
        batch, length = ("", "") if setting == last else (str(setting[0]), str(setting[1] or "as is"))
        last = setting
        rows.append(
            (
                Cell(batch),
                Cell(length),
                Cell(result["method"]),
                speedup(result),
                Cell(spread(result)),
                number(result["tokens_per_second"], "{:.0f}"),
                speedup(result, "decode_speedup"),
                milliseconds(latency.get("first_token_seconds"), "p50"),
                milliseconds(latency.get("between_tokens_seconds"), "p99"),
                megabytes(memory.get("cache_bytes")),
                _failures(result),
            )
        )
    return Sheet(
        "by batch size and prompt length",
        "Prompts per batch, and tokens per prompt. Every speed-up is over plain decoding in the same setting. "
        "Decoding excludes the prefill. The files have the figures by category.",
        (
            "batch",
            "prompt",
            "method",
            "speed-up",
            "lowest to highest",
            "tokens per second",
            "decoding",
            "first ms P50",
            "next ms P99",
            "cache MB",
            "failed",
        ),
        rows,
        labels=3,
    )


def _counted(results: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Sheet:
    return Sheet(
        "counted next to",
        "The suite's own counts.",
        ("method", "category", *(" ".join(column.header.split()) for column in columns)),
        [
            (
                Cell(result["method"] if name == "all" else ""),
                Cell(name),
                *(Cell(column.cell(figures)) for column in columns),
            )
            for result in results
            for name, figures in groups_of(result).items()
        ],
        labels=2,
    )


def _section(section: Section) -> Sheet:
    return Sheet(
        section.title,
        "",
        [" ".join(column.header.split()) for column in section.columns],
        [[Cell(column.cell(row)) for column in section.columns] for row in section.rows],
    )


# ---------------------------------------------------------------------- the cells


def speedup(figures: Mapping[str, Any], name: str = "speedup") -> Cell:
    """Mark as bad below 1, as doubtful if the repeats lie on both sides of 1."""
    value = figures.get(name)
    if value is None:
        return Cell(DASH)
    lowest = (figures["spread"].get(name) or [value])[0]
    return Cell(f"{value:.2f}x", bad=value < SLOWDOWN, doubtful=lowest < SLOWDOWN <= value)


def spread(figures: Mapping[str, Any], name: str = "speedup") -> str:
    """Return the lowest and the highest repeat; empty for one repeat, and for plain decoding."""
    ends = figures["spread"].get(name)
    if not ends or figures["num_repeats"] < 2 or figures.get("method") == BASELINE:
        return DASH
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def _accepted(result: Mapping[str, Any]) -> Cell:
    drafted = result["num_draft_tokens"]
    return Cell(f"{result['num_accepted_tokens'] / drafted:.0%}" if drafted else DASH)


def _equality(result: Mapping[str, Any]) -> Cell:
    share = result["equal_outputs"]
    if share is None or result["method"] == BASELINE:
        return Cell(DASH)
    return Cell(f"{share:.0%}", bad=result["promise"] in _EXACT and share < 1)


def _failures(result: Mapping[str, Any]) -> Cell:
    return Cell(str(result["failures"]), bad=bool(result["failures"]))


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
