"""The benchmark as tables for a terminal. Slowdowns and failures are printed like everything else, in red."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretoken.bench.harness import BASELINE
from foretoken.bench.suite import Column, Section
from foretoken.bench.summary import SLOWDOWN, share_of_time

_DASH = "–"
_COLUMNS = (
    "speed-\nup",
    "lowest-\nhighest",
    "tokens\n/s",
    "tokens\n/step",
    "accep-\nted",
    "draft/\nverify/\nother %",
    "same\ntokens",
    "failed",
)


def tables(
    results: Sequence[dict[str, Any]], title: str, columns: Sequence[Column] = (), sections: Sequence[Section] = ()
) -> RenderableType:
    """Everything that a run has found.

    The overall table and, where there are several categories, speed-up by category; the same for decoding alone, where
    the first token was timed apart, with a suite's own ``columns``; then the ``sections`` of a suite.
    """
    parts: list[RenderableType] = [_overall(results, title)]
    if results and len(results[0]["by_category"]) > 1:
        parts.append(_by_category(results))
    if results and results[0].get("first_token_seconds") is not None:
        parts.append(_decoding(results, columns))
    parts += [_section(section) for section in sections]
    errors = [_error_line(result, error) for result in results for error in result["errors"]]
    return Group(*parts, *errors)


def _overall(results: Sequence[dict[str, Any]], title: str) -> Table:
    table = _table(title)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        shares = share_of_time(result)
        table.add_row(
            result["method"],
            speedup_text(result),
            _spread_text(result),
            _number(result["tokens_per_second"], "{:.0f}"),
            _number(result["tokens_per_step"], "{:.2f}"),
            _acceptance(result),
            "/".join(f"{100 * shares[part]:.0f}" for part in ("draft", "verify", "other")) if shares else _DASH,
            _equality(result),
            Text(str(result["failures"]), style="bold red" if result["failures"] else ""),
        )
    return table


def _by_category(results: Sequence[dict[str, Any]]) -> Table:
    table = _table("speed-up by category")
    categories = list(results[0]["by_category"])
    for category in categories:
        table.add_column(category, justify="right")
    for result in results:
        if result["method"] != BASELINE:
            table.add_row(result["method"], *(speedup_text(result["by_category"][c]) for c in categories))
    baseline = results[0]["by_category"]
    table.add_section()
    table.add_row(f"{BASELINE}, tokens/s", *(_number(baseline[c]["tokens_per_second"], "{:.0f}") for c in categories))
    return table


def _decoding(results: Sequence[dict[str, Any]], columns: Sequence[Column]) -> Table:
    """A row for every method and category, so that nothing stands pooled alone."""
    table = _table("decoding, apart from reading the prompt")
    for name in (
        "category",
        "first\ntoken ms",
        "tokens/s\nbehind it",
        "speed-\nup",
        "lowest-\nhighest",
        "tokens\n/step",
    ):
        table.add_column(name, justify="left" if name == "category" else "right", no_wrap=True)
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    for result in results:
        groups = {"all": result, **result["by_category"]}
        for name, figures in groups.items() if len(groups) > 2 else [("all", result)]:
            first, spread = figures.get("first_token_seconds"), figures["spread"].get("decode_speedup")
            plain = result["method"] == BASELINE
            table.add_row(
                result["method"] if name == "all" else "",
                name,
                _number(None if first is None else 1e3 * first, "{:.1f}"),
                _number(figures.get("decode_tokens_per_second"), "{:.0f}"),
                _number(figures.get("decode_speedup"), "{:.2f}x"),
                _DASH if plain or not spread else f"{spread[0]:.2f}-{spread[1]:.2f}",
                _number(figures["tokens_per_step"], "{:.2f}"),
                *(column.cell(figures) for column in columns),
            )
        table.add_section()
    return table


def _section(section: Section) -> Table:
    first, *rest = section.columns
    table = _table(section.title, first.header)
    for column in rest:
        table.add_column(column.header, justify="right", overflow="fold")
    for row in section.rows:
        table.add_row(*(column.cell(row) for column in section.columns))
    return table


def _table(title: str, first: str = "method") -> Table:
    """Narrow enough for 80 columns: long names of methods fold, figures do not."""
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column(first, overflow="fold", min_width=11)
    return table


def speedup_text(figures: dict[str, Any]) -> Text:
    """Red below 1, yellow where the repeats lie on both sides of 1."""
    value, spread = figures["speedup"], figures["spread"]["speedup"]
    if value is None:
        return Text(_DASH)
    style = "bold red" if value < SLOWDOWN else "yellow" if spread[0] < SLOWDOWN else ""
    return Text(f"{value:.2f}x", style=style)


def _spread_text(result: dict[str, Any]) -> str:
    spread = result["spread"]["speedup"]
    if not spread or result["num_repeats"] < 2 or result["method"] == BASELINE:
        return _DASH
    return f"{spread[0]:.2f}-{spread[1]:.2f}"


def _acceptance(result: dict[str, Any]) -> str:
    drafted = result["num_draft_tokens"]
    return f"{result['num_accepted_tokens'] / drafted:.0%}" if drafted else _DASH


def _equality(result: dict[str, Any]) -> Text:
    share = result["equal_outputs"]
    if share is None or result["method"] == BASELINE:
        return Text(_DASH)
    # under "same law" the draws are others, so other tokens are no fault
    wanted = result["promise"] in ("same text", "same stream")
    return Text(f"{share:.0%}", style="bold red" if wanted and share < 1 else "")


def _error_line(result: dict[str, Any], error: dict[str, str]) -> Text:
    return Text(f"{result['method']}: prompt {error['prompt']} failed: {error['error']}", style="red")


def _number(value: float | None, form: str) -> str:
    return _DASH if value is None else form.format(value)
