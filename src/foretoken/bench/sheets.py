"""The results of a run as tables (table.py).

Every figure over all prompts is followed by the same figure by category.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


Row = Mapping[str, Any]  # figures of a method, over all prompts or of a category
_Columns = Sequence[tuple[str, Callable[[Row], Cell]]]


def _sheet(title: str, meaning: str, columns: _Columns, rows: Iterable[Row], labels: int = 1) -> Sheet:
    """A table from its headings and the cell of a row under each."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return Sheet(title, meaning, [head for head, _ in columns], cells, labels)


def _method(row: Row) -> Cell:
    return Cell(row["method"])


def _overall(results: Sequence[Row]) -> Sheet:
    columns: _Columns = [
        ("method", _method),
        ("speed-up", speedup),
        ("lowest to highest", lambda row: Cell(spread(row))),
        ("tokens per second", lambda row: number(row["tokens_per_second"], "{:.0f}")),
        ("tokens per step", lambda row: number(row["tokens_per_step"])),
        ("accepted", _accepted),
        ("same tokens", _equality),
        ("failed", _failures),
    ]
    meaning = (
        "Tokens per step includes the token that every step adds, so plain decoding is 1.00. Accepted: of all draft "
        "tokens. Same tokens: answers equal to plain decoding's, which “same distribution” does not promise when "
        "sampling."
    )
    return _sheet("overview", meaning, columns, results)


def _categories(results: Sequence[Row]) -> list[Row]:
    """Figures of each method and of its categories; only the first has the method's name."""
    return [
        {**figures, "method": result["method"] if name == "all" else "", "category": name, "of": result["method"]}
        for result in results
        for name, figures in groups_of(result).items()
    ]


def _by_category(results: Sequence[Row]) -> Sheet:
    def against_plain(cell: Callable[[Row], Cell]) -> Callable[[Row], Cell]:
        return lambda row: Cell(DASH) if row["of"] == BASELINE else cell(row)

    columns: _Columns = [
        ("method", _method),
        ("category", lambda row: Cell(row["category"])),
        ("speed-up", against_plain(speedup)),
        ("lowest to highest", against_plain(lambda row: Cell(spread(row)))),
        ("first token ms", lambda row: _first_token(row.get("first_token_seconds"))),
        ("decoding tokens per second", lambda row: number(row.get("decode_tokens_per_second"), "{:.0f}")),
        ("decoding speed-up", against_plain(lambda row: speedup(row, "decode_speedup"))),
        ("tokens per step", lambda row: number(row["tokens_per_step"])),
    ]
    meaning = "First token: the prefill time of a call, per prompt. The next three columns cover decoding only."
    title = "speed-up by category, and decoding, apart from reading the prompt"
    return _sheet(title, meaning, columns, _categories(results), labels=2)


def _first_token(seconds: float | None) -> Cell:
    return number(None if seconds is None else 1e3 * seconds, "{:.1f}")


def _waiting(name: str, quantile: str) -> Callable[[Row], Cell]:
    return lambda row: milliseconds((row.get("latency") or {}).get(name), quantile)


def _latency(results: Sequence[Row]) -> Sheet:
    counts = [result["latency"] for result in results if result.get("latency")]
    answers, gaps = (sorted({each[name] for each in counts}) for name in ("num_answers", "num_gaps"))
    columns: _Columns = [
        ("method", _method),
        ("first token P50", _waiting("first_token_seconds", "p50")),
        ("P99", _waiting("first_token_seconds", "p99")),
        ("between tokens mean", _waiting("between_tokens_seconds", "mean")),
        ("P50", _waiting("between_tokens_seconds", "p50")),
        ("P99", _waiting("between_tokens_seconds", "p99")),
        ("whole answer P50", _waiting("answer_seconds", "p50")),
        ("P99", _waiting("answer_seconds", "p99")),
    ]
    meaning = (
        "P50 and P99, from the queueing of a request. Tokens that are accepted together arrive together: the first of "
        "them waits for the whole step and the others do not wait, so a P50 between tokens may be 0; the mean is "
        f"decoding's. {_span(answers)} answers and {_span(gaps)} gaps of each method."
    )
    return _sheet("what a reader waits for, milliseconds", meaning, columns, results)


def _costs(results: Sequence[Row]) -> Sheet:
    def share(part: str) -> Callable[[Row], Cell]:
        return lambda row: number(100 * shares[part] if (shares := share_of_time(row)) else None, "{:.0f}%")

    columns: _Columns = [
        ("method", _method),
        *((part, share(part)) for part in ("draft", "verify", "other")),
        ("target's cache MB", _memory("cache_bytes")),
        ("drafter MB", _memory("drafter_bytes")),
    ]
    meaning = (
        "Time is drafting, the target's forward with the verification, and the rest. The target's keys and "
        "values, and what the drafter holds in tensors of its own: weights, keys and values, tables."
    )
    return _sheet("where time and memory go", meaning, columns, results)


def _memory(name: str) -> Callable[[Row], Cell]:
    return lambda row: megabytes((row.get("memory") or {}).get(name))


def _acceptance(results: Sequence[Row]) -> Sheet:
    drafting = [result for result in results if result["acceptance_by_position"]]
    deepest = max(min(len(result["acceptance_by_position"]), MAX_DEPTH) for result in drafting)

    def at(depth: int, result: Row) -> Cell:
        rates, counts = result["acceptance_by_position"], result["observations_by_position"]
        if depth >= len(rates):
            return Cell(DASH)
        return Cell(f"{rates[depth]:.2f} of {counts[depth]}", doubtful=counts[depth] < FEW)

    return Sheet(
        "acceptance by position in the draft",
        "The share of steps that accepted the draft up to this position, among those that drafted so far; a share of "
        f"fewer than {FEW} is unreliable.",
        ("position", *(result["method"] for result in drafting)),
        [[Cell(str(depth + 1)), *(at(depth, result) for result in drafting)] for depth in range(deepest)],
    )


def _grid(results: Sequence[Row]) -> Sheet:
    rows: list[Row] = []
    last: tuple[Any, Any] | None = None
    for result in results:
        setting = (result.get("batch_size"), result.get("prompt_tokens"))
        batch, length = ("", "") if setting == last else (str(setting[0]), str(setting[1] or "as is"))
        rows.append({**result, "batch": batch, "prompt": length})
        last = setting
    columns: _Columns = [
        ("batch", lambda row: Cell(row["batch"])),
        ("prompt", lambda row: Cell(row["prompt"])),
        ("method", _method),
        ("speed-up", speedup),
        ("lowest to highest", lambda row: Cell(spread(row))),
        ("tokens per second", lambda row: number(row["tokens_per_second"], "{:.0f}")),
        ("decoding", lambda row: speedup(row, "decode_speedup")),
        ("first ms P50", _waiting("first_token_seconds", "p50")),
        ("next ms P99", _waiting("between_tokens_seconds", "p99")),
        ("cache MB", _memory("cache_bytes")),
        ("failed", _failures),
    ]
    meaning = (
        "Prompts per batch, and tokens per prompt. Every speed-up is over plain decoding in the same setting. "
        "Decoding excludes the prefill. The files have the figures by category."
    )
    return _sheet("by batch size and prompt length", meaning, columns, rows, labels=3)


def _of_suite(columns: Sequence[Column]) -> _Columns:
    def cell_of(column: Column) -> Callable[[Row], Cell]:
        return lambda row: Cell(column.cell(row))

    return [(" ".join(each.header.split()), cell_of(each)) for each in columns]


def _counted(results: Sequence[Row], columns: Sequence[Column]) -> Sheet:
    named: _Columns = [("method", _method), ("category", lambda row: Cell(row["category"])), *_of_suite(columns)]
    return _sheet("counted next to", "The suite's own counts.", named, _categories(results), labels=2)


def _section(section: Section) -> Sheet:
    return _sheet(section.title, "", _of_suite(section.columns), section.rows)


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
