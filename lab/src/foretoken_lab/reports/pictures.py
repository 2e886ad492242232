"""Charts of a benchmark, as inline SVG, each in two versions: for wide and for narrow screens."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

from foretoken.bench.harness import BASELINE
from foretoken.bench.sheets import FEW, MAX_DEPTH, groups_of, settings_of
from foretoken.bench.summary import SLOWDOWN

# Okabe and Ito: distinguishable with most colour blindness, and in grey
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31", "#666666")
_PARTS = {"draft": "#E69F00", "verify": "#0072B2", "other": "#AAAAAA"}
_MEMORY = {"cache_bytes": ("target's cache", "#0072B2"), "drafter_bytes": ("drafter", "#E69F00")}
_WAITS = {
    "first_token_seconds": "first token",
    "between_tokens_seconds": "between tokens",
    "answer_seconds": "whole answer",
}
_LETTERS = 100  # legend entries per row in a wide chart
_LONG, _LONG_IN_LEGEND = 18, 36  # maximum letters per line of a method's name, next to its bar and in a legend
_WIDE, _NARROW = 9.0, 4.4  # inches: text of 10 points is legible on a desktop screen, and on a phone


class Picture(NamedTuple):
    """A chart above a table.

    Attributes:
        heading: replaces the table's title.
        sentence: explains the chart.
        figures: HTML.
    """

    heading: str
    sentence: str
    figures: str


def pictures(results: Sequence[dict[str, Any]]) -> dict[str, Picture]:
    """Return the charts by the title of their table."""
    methods = [result for result in results if result["method"] != BASELINE]
    found: dict[str, Picture] = {}
    if len(settings_of(results)) > 1:
        if methods:
            found["by batch size and prompt length"] = Picture(
                "Speed-up by batch size and prompt length",
                "One line per method and length; above the broken line it is faster. Whiskers are the lowest and the "
                "highest repeat.",
                _picture("grid", "speed-up by batch size and prompt length", _draw_grid, methods, lambda wide: 3.4),
            )
        return found
    num_groups = len(groups_of(results[0])) if results else 0
    num_bars = num_groups * len(methods)
    if methods:
        found["speed-up by category, and decoding, apart from reading the prompt"] = Picture(
            "Speed-up by method and category",
            "Tokens per second over plain decoding in the same run: above the line a method is faster, below slower. "
            "Bars are medians over the repeats, whiskers the lowest and the highest; hatched bars are slowdowns.",
            _picture(
                "speedup",
                "speed-up by method and category",
                _draw_speedup,
                methods,
                lambda wide: 3.6 if wide else 1.2 + 0.3 * num_groups + 0.14 * num_bars,
            ),
        )
    if any(result.get("latency") for result in results):
        found["what a reader waits for, milliseconds"] = Picture(
            "What a reader waits for",
            "Bars are medians, the marks 99th percentiles. Between tokens the bar is the mean.",
            _picture(
                "latency",
                "first token, between tokens, and whole answers by method",
                _draw_latency,
                results,
                lambda wide: 0.9 + 0.35 * len(results) if wide else 3 * (0.8 + 0.36 * len(results)),
                panels=len(_WAITS),
            ),
        )
    if any(method["acceptance_by_position"] for method in methods):
        found["acceptance by position in the draft"] = Picture(
            "Acceptance by position",
            f"A line that falls slowly suggests longer drafts; a hollow mark has fewer than {FEW} observations.",
            _picture("acceptance", "acceptance by position in the draft", _draw_acceptance, methods, lambda wide: 3.2),
        )
    shown = _picture("time", "time by method", _draw_time, results, lambda wide: 1.0 + 0.4 * len(results))
    if any(result.get("memory") for result in results):
        shown += _picture("memory", "memory by method", _draw_memory, results, lambda wide: 1.0 + 0.4 * len(results))
    found["where time and memory go"] = Picture(
        "Where the time goes",
        "Milliseconds per generated token: the shorter the bar, the faster; plain decoding has nothing to draft.",
        shown,
    )
    return found


def _picture(
    name: str,
    label: str,
    draw: Callable[..., None],
    results: Sequence[dict[str, Any]],
    height: Callable[[bool], float],
    *,
    panels: int = 1,
) -> str:
    """Draw for a wide and for a narrow screen; the style sheet displays one of them.

    Args:
        draw: receives the axes, the ``results``, and whether the chart is ``wide``.
        height: height in inches, wide or narrow.
        panels: number of axes, side by side if wide.
    """
    drawn = []
    for kind, width in (("wide", _WIDE), ("narrow", _NARROW)):
        wide = kind == "wide"
        drawing = partial(draw, results=results, wide=wide)
        svg = _svg(f"{name}-{kind}", drawing, width, height(wide), panels, wide)
        drawn.append(f'<figure class="{kind}" role="img" aria-label="{escape(label)}">{svg}</figure>')
    return "".join(drawn)


def _svg(
    name: str, draw: Callable[[Sequence[Any]], None], width: float, height: float, panels: int, beside: bool
) -> str:
    """Draw into a separate figure (no global pyplot state) and return it as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",  # keep text as text: small, sharp and searchable
        "svg.hashsalt": name,  # ids differ between charts, and are the same in every run
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8a94a0",
        "hatch.linewidth": 0.6,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        shape = (1, panels) if beside else (panels, 1)
        draw(list(figure.subplots(*shape, squeeze=False).flat))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _draw_speedup(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    """Draw vertical bars if they fit, else horizontal ones."""
    from matplotlib.patches import Patch

    axes = panels[0]
    groups = list(groups_of(results[0]))
    width = 0.8 / len(results)
    for row, method in enumerate(results):
        for place, (_, figures) in enumerate(groups_of(method).items()):
            value, ends = figures["speedup"], figures["spread"]["speedup"]
            if value is None:
                continue
            where = place - 0.4 + (row + 0.5) * width
            whiskers = [[value - ends[0]], [ends[1] - value]] if figures["num_repeats"] > 1 else None
            look = {
                "color": _COLOURS[row % len(_COLOURS)],
                "hatch": "////" if value < SLOWDOWN else None,
                "edgecolor": "white",
                "linewidth": 0,
                "error_kw": {"ecolor": "#333", "elinewidth": 0.9, "capsize": 2},
            }
            if wide:
                axes.bar(where, value, width * 0.92, yerr=whiskers, **look)
            else:
                axes.barh(where, value, width * 0.92, xerr=whiskers, **look)
    line = {"color": "#1c2430", "linewidth": 1, "linestyle": "--"}
    if wide:
        axes.axhline(1.0, **line)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel("speed-up over plain decoding")
        axes.set_ylim(bottom=0)
    else:
        axes.axvline(1.0, **line)
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        axes.set_xlabel("speed-up over plain decoding")
        axes.set_xlim(left=0)
    handles = [Patch(color=_COLOURS[row % len(_COLOURS)], label=each["method"]) for row, each in enumerate(results)]
    _legend(axes, wide, handles)


def _draw_latency(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    shown = [result for result in results if result.get("latency")]
    for place, (axes, (name, title)) in enumerate(zip(panels, _WAITS.items(), strict=True)):
        for row, result in enumerate(shown):
            found = result["latency"][name]
            if found is None:
                continue
            axes.barh(row, 1e3 * found.get("mean", found["p50"]), 0.62, color="#0072B2")
            axes.plot(1e3 * found["p99"], row, marker="|", markersize=11, markeredgewidth=2, color="#D55E00")
        labelled = place == 0 or not wide
        _name_bars(axes, shown if labelled else [], len(shown))
        axes.invert_yaxis()
        axes.set_title(f"{title}, ms", fontsize=10, loc="left")
        axes.set_xlim(left=0)


def _draw_acceptance(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    axes = panels[0]
    for row, method in enumerate(results):
        rates = method["acceptance_by_position"][:MAX_DEPTH]
        if not rates:
            continue
        colour = _COLOURS[row % len(_COLOURS)]
        depths = range(1, len(rates) + 1)
        axes.plot(depths, rates, color=colour, label=method["method"])
        for depth, rate, count in zip(depths, rates, method["observations_by_position"], strict=False):
            axes.plot(
                depth, rate, marker="o", markersize=5, color=colour, markerfacecolor="white" if count < FEW else colour
            )
    deepest = max(min(len(method["acceptance_by_position"]), MAX_DEPTH) for method in results)
    axes.set_xticks(range(1, deepest + 1, 1 if wide or deepest < 10 else 2))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1.03)
    axes.grid(axis="y", color="#e3e7ec")
    _legend(axes, wide)


def _draw_time(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    shown = [result for result in results if result["num_tokens"]]
    parts = {
        part: (part, colour, [1000 * result["time"][part] / result["num_tokens"] for result in shown])
        for part, colour in _PARTS.items()
    }
    _stacked(panels[0], shown, parts, "milliseconds per token")


def _draw_memory(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    shown = [result for result in results if result.get("memory")]
    parts = {
        part: (name, colour, [result["memory"][part] / 1e6 for result in shown])
        for part, (name, colour) in _MEMORY.items()
    }
    _stacked(panels[0], shown, parts, "MB, next to the target's weights")


def _stacked(
    axes: Any, results: Sequence[dict[str, Any]], parts: Mapping[str, tuple[str, str, Sequence[float]]], unit: str
) -> None:
    left = [0.0] * len(results)
    for name, colour, widths in parts.values():
        axes.barh(range(len(results)), widths, 0.62, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _name_bars(axes, results, len(results))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))


def _name_bars(axes: Any, results: Sequence[dict[str, Any]], count: int) -> None:
    """Label horizontal bars with the methods' names, long ones folded and small; none without results."""
    names = [result["method"] for result in results] or [""] * count
    folded = [_folded(name, _LONG) for name in names]
    axes.set_yticks(range(count), folded, fontsize=10 if folded == names else 7)


def _folded(name: str, most: int) -> str:
    """Fold a method's name and settings into lines of limited length."""
    lines = [""]
    for piece in name.split("+"):
        joined = f"{lines[-1]}+{piece}" if lines[-1] else piece
        if lines[-1] and len(joined) > most:
            lines.append(f"+{piece}")
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _draw_grid(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    """Plot over the batch size, with one line per length; over the length if there is one batch size."""
    axes = panels[0]
    across, other = "batch_size", "prompt_tokens"
    if len({result["batch_size"] for result in results}) == 1:
        across, other = other, across
    places = sorted({result[across] for result in results})
    for row, label in enumerate(dict.fromkeys(result["method"] for result in results)):
        for style, kind in enumerate(dict.fromkeys(result[other] for result in results)):
            own = [r for r in results if (r["method"], r[other]) == (label, kind) and r["speedup"] is not None]
            if not own:
                continue
            ends = [r["spread"]["speedup"] for r in own]
            whiskers = [
                [r["speedup"] - low for r, (low, _) in zip(own, ends, strict=True)],
                [high - r["speedup"] for r, (_, high) in zip(own, ends, strict=True)],
            ]
            axes.errorbar(
                [places.index(r[across]) for r in own],
                [r["speedup"] for r in own],
                yerr=whiskers if own[0]["num_repeats"] > 1 else None,
                capsize=2,
                marker="os^Dv"[style % 5],
                linestyle=("-", "--", ":", "-.")[style % 4],
                color=_COLOURS[row % len(_COLOURS)],
                label=label if other == "batch_size" or kind is None else f"{label}, {kind} tokens",
            )
    axes.axhline(1.0, color="#1c2430", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(places)), places)
    axes.set_xlabel("prompts per batch" if across == "batch_size" else "tokens per prompt")
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    _legend(axes, wide)


def _legend(axes: Any, wide: bool, handles: Any = None) -> None:
    """Put the legend above the chart, where it covers nothing."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    labels = [each.get_label() if wide else _folded(each.get_label(), _LONG_IN_LEGEND) for each in handles]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    axes.legend(
        handles=handles,
        labels=labels,
        frameon=False,
        ncols=max(1, min(4, (_LETTERS if wide else _LETTERS // 2) // (longest + 6))),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
    )
