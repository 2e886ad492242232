"""A trade-off in one picture: quality against the speed of the clock and against tokens per step, one line per rule.

A row for each temperature. Points on the Pareto front wear a ring. Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from foretoken.analysis.pictures import COLOURS
from foretoken.analysis.tradeoff import Row, Spread, Tradeoff, quality_gain

_MARKERS = "osD^vP*X"
_COMPARED = {"plain": ("s", "#6b7480"), "draft": ("X", "#6b7480"), "exact": ("*", "#1c2430")}
_QUALITY = {
    "accuracy": ("accuracy against exact, points (95 %, paired)", 100.0),
    "rougeL": ("ROUGE-L against exact, points (95 %, paired)", 100.0),
    "nll": ("log-likelihood against exact, nats a token (95 %)", 1.0),
}
_SIZE = (5.2, 4.4)  # inches of a panel


def draw_tradeoff(studies: Sequence[Tradeoff], title: str) -> bytes:
    """The picture as PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(2 * _SIZE[0] + 1.6, _SIZE[1] * len(studies)), layout="constrained")
        panels = figure.subplots(len(studies), 2, squeeze=False, sharey="row")
        for (left, right), study in zip(panels, studies, strict=True):
            _panel(left, study, "tokens_per_second", lambda row: row.against_plain)
            left.set_xscale("log", base=2)  # the draft alone is far off
            left.xaxis.set_major_formatter("{x:g}")
            left.set_xlabel("tokens/s, times plain decoding (median and range)")
            _panel(right, study, "tokens_per_step", _steps)
            right.set_xlabel("tokens per step")
            label, _ = _QUALITY[study.measure]
            left.set_ylabel(label)
            left.set_title(f"temperature {study.temperature:g}: {title}", loc="left")
            left.legend(frameon=False, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _steps(row: Row) -> Spread | None:
    value = row.tokens_per_step
    return None if value is None else Spread(value, value, value, 1)


def _panel(axes: Any, study: Tradeoff, front: str, speed: Callable[[Row], Spread | None]) -> None:
    scale = _QUALITY[study.measure][1]
    lines: dict[str, list[tuple[Row, Spread]]] = {}
    for row in study.rows:
        place = speed(row)
        if place is not None:
            lines.setdefault(row.point.line, []).append((row, place))
    rules = [name for name in lines if name not in _COMPARED]
    for name, points in lines.items():
        if name in _COMPARED:
            (marker, colour), style = _COMPARED[name], "none"
        else:
            number = rules.index(name)
            colour = COLOURS[number % len(COLOURS)]
            marker, style = _MARKERS[number % len(_MARKERS)], ":" if name.endswith("budget") else "-"
        heights, errors = zip(*(_height(row, study.measure, scale) for row, _ in points), strict=True)
        axes.errorbar(
            [place.middle for _, place in points],
            heights,
            xerr=[[p.middle - p.low for _, p in points], [p.high - p.middle for _, p in points]],
            yerr=list(zip(*errors, strict=True)),
            marker=marker,
            markersize=5,
            linestyle=style,
            linewidth=1.0,
            elinewidth=0.5,
            color=colour,
            label=name,
        )
    axes.axhline(0.0, color="#1c2430", linewidth=0.7, linestyle="--", zorder=0)
    axes.grid(color="#e3e7ec", linewidth=0.6)
    best = [(place.middle, _height(row, study.measure, scale)[0]) for row, place in _on_front(study, front, speed)]
    axes.plot(
        *zip(*sorted(best), strict=True),
        color="#9aa4b0",
        linewidth=3.0,
        alpha=0.4,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        zorder=0,
        label="Pareto front",
    )


def _on_front(study: Tradeoff, front: str, speed: Callable[[Row], Spread | None]) -> list[tuple[Row, Spread]]:
    rows = [(study.rows[index], speed(study.rows[index])) for index in study.fronts[front]]
    return [(row, place) for row, place in rows if place is not None]


def _height(row: Row, measure: str, scale: float) -> tuple[float, tuple[float, float]]:
    """Quality against exact verification, and what the bar extends below and above it."""
    gain = quality_gain(row, measure)
    if gain is None:
        return 0.0, (0.0, 0.0)
    if gain.interval is None:
        return scale * gain.mean, (0.0, 0.0)
    return scale * gain.mean, (scale * (gain.mean - gain.interval[0]), scale * (gain.interval[1] - gain.mean))
