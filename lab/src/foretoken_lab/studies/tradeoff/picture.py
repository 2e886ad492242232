"""A trade-off in one picture: quality against the clock, tokens per step and counted FLOPs, one line per rule.

A row for each temperature and measure of quality. Points on the Pareto front wear a ring, where the measure is the one
that it is of. Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from foretoken_lab.studies.acceptance.pictures import COLOURS
from foretoken_lab.studies.tradeoff.points import PLAIN
from foretoken_lab.studies.tradeoff.study import Row, Spread, Tradeoff, measures, quality_gain

_MARKERS = "osD^vP*X"
_COMPARED = {"plain": ("s", "#6b7480"), "draft": ("X", "#6b7480"), "exact": ("*", "#1c2430")}
_QUALITY = {
    "accuracy": ("accuracy against exact, points (95 %, paired)", 100.0),
    "rougeL": ("ROUGE-L against exact, points (95 %, paired)", 100.0),
    "nll": ("log-likelihood against exact, nats a token (95 %)", 1.0),
}
_SIZE = (5.2, 3.8)  # inches of a panel


def draw_tradeoff(studies: Sequence[Tradeoff], title: str) -> bytes:
    """The picture as PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = [(study, measure) for study in studies for measure in measures(study)]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3 * _SIZE[0] + 1.6, _SIZE[1] * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), 3, squeeze=False, sharey="row")
        for (left, middle, right), (study, measure) in zip(panels, rows, strict=True):
            _panel(left, study, measure, "tokens_per_second", lambda row: row.against_plain)
            left.set_xlabel("tokens/s, times plain decoding (median and range)")
            _panel(middle, study, measure, "tokens_per_step", _steps)
            middle.set_xlabel("tokens per step")
            _panel(right, study, measure, "flops_per_token", _flops_against(study.row(PLAIN)))
            right.set_xlabel("counted FLOPs per token, times plain decoding")
            for panel in (left, right):
                panel.set_xscale("log", base=2)  # the draft alone is far off
                panel.xaxis.set_major_formatter("{x:g}")
            left.set_ylabel(_QUALITY[measure][0])
            left.set_title(f"temperature {study.temperature:g}: {title}", loc="left")
            left.legend(frameon=False, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _steps(row: Row) -> Spread | None:
    return _exactly(row.tokens_per_step)


def _flops_against(plain: Row | None) -> Callable[[Row], Spread | None]:
    unit = plain and plain.flops_per_token
    return lambda row: None if not unit or row.flops_per_token is None else _exactly(row.flops_per_token / unit)


def _exactly(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, value, value, 1)


def _panel(axes: Any, study: Tradeoff, measure: str, front: str, speed: Callable[[Row], Spread | None]) -> None:
    """One measure of quality against one of speed; the front is drawn for the measure that it is of."""
    scale = _QUALITY[measure][1]
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
        heights, errors = zip(*(_height(row, measure, scale) for row, _ in points), strict=True)
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
    if measure != study.measure:
        return
    best = [(place.middle, _height(row, measure, scale)[0]) for row, place in _on_front(study, front, speed)]
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
