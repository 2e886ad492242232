"""Measurements of several engines, and figures computed from them. This module depends on no engine.

Definitions, over calls that did not fail:

* tokens/s of a prompt: tokens, end token included, over the wall time of the whole call, prompt included.
* decoding tokens/s: tokens after the first, over the wall time beyond that of a call for one token.
* ratio to another engine: of tokens/s, paired by prompt and repeat; median and quartiles over the pairs.
* throughput: all tokens over all wall time, so that long answers weigh more; median over repeats.
* same: share of prompts on which the tokens equal our plain decoding's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BASELINE = "transformers"
REFERENCE = "none"


@dataclass(frozen=True)
class Call:
    """One prompt through one engine.

    Attributes:
        seconds: wall time of the call.
        first: wall time of a call for one token on the same prompt, measured right after; 0 if it was not.
        tokens: the generated tokens.
        steps: target calls, where the engine reports them; else 0.
        error: why it failed, or None.
    """

    engine: str
    prompt: int
    category: str
    repeat: int
    seconds: float
    first: float
    tokens: tuple[int, ...]
    steps: int = 0
    error: str | None = None

    @property
    def speed(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def decoding_speed(self) -> float | None:
        """Tokens after the first over the time beyond it; None where that was not measured."""
        beyond = self.seconds - self.first
        return (len(self.tokens) - 1) / beyond if self.first and len(self.tokens) > 1 and beyond > 0 else None


def summarise(calls: Sequence[Call], engines: Sequence[str]) -> list[dict[str, Any]]:
    """One JSON-ready object an engine, with the same figures by category."""
    categories = list(dict.fromkeys(call.category for call in calls))
    by_engine = {name: [call for call in calls if call.engine == name] for name in engines}
    results = []
    for name, mine in by_engine.items():
        result = {"engine": name, **_figures(mine, by_engine)}
        result["by_category"] = {
            category: _figures(
                [call for call in mine if call.category == category],
                {n: [call for call in other if call.category == category] for n, other in by_engine.items()},
            )
            for category in categories
        }
        errors = list(dict.fromkeys(call.error for call in mine if call.error))
        results.append({**result, "errors": errors[:5]})
    return results


def _figures(mine: Sequence[Call], by_engine: dict[str, list[Call]]) -> dict[str, Any]:
    good = [call for call in mine if call.error is None]
    figures: dict[str, Any] = {"num_calls": len(mine), "failures": len(mine) - len(good)}
    if not good:
        return figures
    later = sum(len(call.tokens) - 1 for call in good if call.first)
    beyond = sum(call.seconds - call.first for call in good if call.first)
    steps = sum(call.steps for call in good)
    figures |= {
        "num_tokens_per_call": sum(len(call.tokens) for call in good) / len(good),
        "tokens_per_second": spread(call.speed for call in good),
        "throughput": median(_throughput(calls) for calls in _by_repeat(good)),
        "decoding_tokens_per_second": later / beyond if later and beyond > 0 else None,
        "milliseconds_per_decoded_token": 1000 * beyond / later if later else None,
        "first_token_milliseconds": 1000 * median([call.first for call in good if call.first] or [0.0]),
        "tokens_per_step": sum(len(call.tokens) for call in good) / steps if steps else None,
        "ratio_to_transformers": ratio(good, by_engine.get(BASELINE, ())),
        "ratio_to_none": ratio(good, by_engine.get(REFERENCE, ())),
        "equality": equality(good, by_engine.get(REFERENCE, ())),
    }
    return figures


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median, quartiles and extremes."""
    array = np.fromiter(values, dtype=float)
    if not len(array):
        return None
    low, lower, middle, upper, high = np.percentile(array, [0, 25, 50, 75, 100])
    return {"median": middle, "quartiles": [lower, upper], "range": [low, high], "num": len(array)}


def ratio(mine: Sequence[Call], theirs: Sequence[Call]) -> dict[str, Any] | None:
    """Paired ratios of tokens/s, and the ratio of throughputs by repeat.

    ``decoding`` repeats the first for decoding alone, ``same_tokens`` over the pairs with equal outputs, where nothing
    but speed differs.
    """
    others = {(call.prompt, call.repeat): call for call in theirs if call.error is None}
    pairs = [(call, others[call.prompt, call.repeat]) for call in mine if (call.prompt, call.repeat) in others]
    paired = spread(a.speed / b.speed for a, b in pairs)
    if paired is None:
        return None
    repeats = sorted({a.repeat for a, _ in pairs})
    throughputs = [
        _throughput([a for a, _ in pairs if a.repeat == r]) / _throughput([b for _, b in pairs if b.repeat == r])
        for r in repeats
    ]
    return {
        **paired,
        "throughput": median(throughputs),
        "throughput_range": [min(throughputs), max(throughputs)],
        "decoding": spread(
            a.decoding_speed / b.decoding_speed for a, b in pairs if a.decoding_speed and b.decoding_speed
        ),
        "same_tokens": spread(a.speed / b.speed for a, b in pairs if a.tokens == b.tokens),
    }


def equality(mine: Sequence[Call], reference: Sequence[Call]) -> dict[str, Any] | None:
    """How often the tokens are those of our plain decoding, and where they first are not.

    ``stable`` says whether an engine gave the same tokens in every repeat.
    """
    wanted = {call.prompt: call.tokens for call in reversed(reference) if call.error is None}
    got: dict[int, set[tuple[int, ...]]] = {}
    for call in mine:
        if call.prompt in wanted:
            got.setdefault(call.prompt, set()).add(call.tokens)
    if not got:
        return None
    places = [first_difference(tokens, wanted[p]) for p, outputs in got.items() for tokens in outputs]
    differing = [place for place in places if place is not None]
    return {
        "same": sum(outputs == {wanted[prompt]} for prompt, outputs in got.items()) / len(got),
        "num_prompts": len(got),
        "stable": all(len(outputs) == 1 for outputs in got.values()),
        "first_difference": spread(differing),
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if the sequences are equal."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def so_far(calls: Sequence[Call]) -> str:
    """Tokens per second of each engine over all calls, in a line."""
    good: dict[str, list[Call]] = {}
    for call in calls:
        good.setdefault(call.engine, []).extend([] if call.error else [call])
    return ", ".join(f"{name} {_throughput(each):.0f}" if each else f"{name} –" for name, each in good.items())


def best(results: Sequence[dict[str, Any]], names: Iterable[str]) -> str | None:
    """The fastest of some engines: by their ratio to transformers, else to our plain decoding, else by tokens/s."""
    names = set(names)
    able = [result for result in results if result["engine"] in names and result.get("tokens_per_second")]

    def key(result: dict[str, Any]) -> float:
        figure = result["ratio_to_transformers"] or result["ratio_to_none"] or result["tokens_per_second"]
        return float(figure["median"])

    return max(able, key=key)["engine"] if able else None


def _throughput(calls: Sequence[Call]) -> float:
    return sum(len(call.tokens) for call in calls) / sum(call.seconds for call in calls)


def _by_repeat(calls: Iterable[Call]) -> list[list[Call]]:
    parts: dict[int, list[Call]] = {}
    for call in calls:
        parts.setdefault(call.repeat, []).append(call)
    return list(parts.values())


# -------------------------------------------------------------------------------------------------------- tables


def tables(results: Sequence[dict[str, Any]], headlines: Sequence[dict[str, Any]], title: str) -> RenderableType:
    parts: list[RenderableType] = [_overall(results, title), _by_category(results)]
    parts += [Text(_headline_text(each)) for each in headlines]
    parts += [Text(f"{r['engine']}: {error}", style="red") for r in results for error in r["errors"]]
    return Group(*parts)


def _overall(results: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("engine", no_wrap=True)
    against, field = _against(results)
    names = ("tokens/s", "throughput", f"vs {against}", "quartiles", "ms/token", "1st ms", "tok/step", "same")
    for name in (*names, "diff at", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        ratios = result.get(field)
        equal = result.get("equality")
        where = equal and equal["first_difference"]
        table.add_row(
            result["engine"],
            _number(result.get("tokens_per_second", {}).get("median"), "{:.0f}"),
            _number(result.get("throughput"), "{:.0f}"),
            _ratio_text(ratios and ratios["median"]),
            "{:.2f}-{:.2f}".format(*ratios["quartiles"]) if ratios else "–",
            _number(result.get("milliseconds_per_decoded_token"), "{:.2f}"),
            _number(result.get("first_token_milliseconds"), "{:.1f}"),
            _number(result.get("tokens_per_step"), "{:.2f}"),
            _number(equal and equal["same"], "{:.0%}"),
            _number(where and where["median"], "{:.0f}"),
            Text(str(result["failures"]), style="bold red" if result["failures"] else ""),
        )
    return table


def _by_category(results: Sequence[dict[str, Any]]) -> Table:
    against, field = _against(results)
    table = Table(title=f"tokens/s vs {against}, by category (median)", title_justify="left", header_style="bold")
    table.add_column("engine", no_wrap=True)
    categories = list(results[0]["by_category"])
    for category in categories:
        table.add_column(category, justify="right")
    for result in results:
        cells = []
        for category in categories:
            ratios = result["by_category"][category].get(field)
            cells.append(_ratio_text(ratios and ratios["median"]))
        table.add_row(result["engine"], *cells)
    return table


def _against(results: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the tables compare with, and the figure that does: transformers where it was measured, else our plain."""
    fields = {BASELINE: "ratio_to_transformers", REFERENCE: "ratio_to_none"}
    return next((each for each in fields.items() if any(result.get(each[1]) for result in results)), (BASELINE, ""))


def _ratio_text(value: float | None) -> Text:
    """Two digits and a cross; red if slower."""
    if value is None:
        return Text("–")
    return Text(f"{value:.2f}x", style="bold red" if value < 0.995 else "")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _headline_text(headline: dict[str, Any]) -> str:
    low, high = headline["quartiles"]
    text = f"{headline['what']}: {headline['engine']} is {headline['median']:.2f}x {headline['against']}"
    alone = headline["decoding"]
    decoding = f"; decoding alone {alone['median']:.2f}x" if alone else ""
    return f"{text} (quartiles {low:.2f}-{high:.2f}; throughput {headline['throughput']:.2f}x{decoding})"
