"""A trade-off as tables for a terminal of 100 columns: quality and speed of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretoken_lab.studies.tradeoff.points import EXACT, PLAIN
from foretoken_lab.studies.tradeoff.study import Gain, Interval, Quality, Row, Spread, Tradeoff

_DASH = "–"
_ROUGE = "rougeL"
_UNITS = ("", "k", "M", "G", "T", "P")

Cells = Callable[[int, Row], Sequence[str]]


def tables(study: Tradeoff) -> RenderableType:
    """Quality, quality by task where there are several, ROUGE where there are summaries, and speed."""
    parts: list[RenderableType] = [_quality(study)]
    if any(_ROUGE in row.quality.measures for row in study.rows):
        parts.append(_rouge(study))
    tasks = list(study.rows[0].by_task)
    if len(tasks) > 1:
        parts.append(_by_task(study, tasks))
    return Group(*parts, _speed(study))


def _quality(study: Tradeoff) -> Table:
    judged = any(row.quality.accuracy is not None for row in study.rows)

    def cells(number: int, row: Row) -> list[str]:
        quality = row.quality
        return [
            *(_accuracy(quality) if judged else ()),
            _DASH if quality.nll is None else f"{quality.nll:.3f}",
            *_gain(quality.nll_gain, "{:+.3f}"),
        ]

    columns = ("accuracy\n%", "95 %", "- exact\npoints", "95 %") if judged else ()
    return _table(
        "quality; '- exact': minus exact verification, paired by question",
        (*columns, "nll\nnats/tok", "- exact\nnats/tok", "95 %"),
        study,
        cells,
    )


def _accuracy(quality: Quality) -> list[str]:
    difference = quality.difference
    return [
        _share(quality.accuracy),
        _ends(quality.interval, "{:.0f}", 100.0),
        _DASH if difference is None else f"{100 * difference.mean + 0.0:+.1f}",
        _DASH if difference is None else _ends((difference.low, difference.high), "{:+.1f}", 100.0),
    ]


def _rouge(study: Tradeoff) -> Table:
    return _table(
        "summaries: ROUGE-L F1",
        ("ROUGE-L\n%", "- exact\npoints", "95 %"),
        study,
        lambda number, row: [
            _share(row.quality.measures.get(_ROUGE)),
            *_gain(row.quality.gains.get(_ROUGE), "{:+.1f}", 100.0),
        ],
    )


def _by_task(study: Tradeoff, tasks: list[str]) -> Table:
    return _table(
        "by task: accuracy % (or ROUGE-L)",
        tasks,
        study,
        lambda number, row: [_main(row.by_task[task]) for task in tasks],
    )


def _main(quality: Quality) -> str:
    return _share(quality.measures.get(_ROUGE) if quality.accuracy is None else quality.accuracy)


def _speed(study: Tradeoff) -> Table:
    def cells(number: int, row: Row) -> list[str]:
        steps = row.tokens_per_step
        return [
            _DASH if steps is None else _starred(f"{steps:.2f}", number in study.fronts["tokens_per_step"]),
            _DASH
            if row.flops_per_token is None
            else _starred(_scaled(row.flops_per_token), number in study.fronts["flops_per_token"]),
            f"{row.tokens_per_second.middle:.0f}",
            _starred(f"{row.against_plain.middle:.2f}", number in study.fronts["tokens_per_second"]),
            _DASH if row.point.rule == PLAIN else _range(row.against_plain),
            _DASH if row.modelled is None else f"{row.modelled:.2f}",
            f"{row.against_exact.middle:.2f}",
            _DASH if row.point.rule == EXACT else _range(row.against_exact),
            *(_DASH if value is None else f"{value:.3f}" for value in (row.distortion, row.kl)),
        ]

    repeats = "one repeat" if study.num_repeats == 1 else f"median and range of {study.num_repeats} repeats"
    return _table(
        f"speed, {repeats}; *: on the Pareto front with {study.measure}",
        (
            "tokens\n/step",
            "FLOPs\n/tok",
            "tokens\n/s",
            "times\nplain",
            "range",
            "by\ncosts",
            "times\nexact",
            "range",
            "TV",
            "KL",
        ),
        study,
        cells,
    )


def _table(title: str, columns: Sequence[str], study: Tradeoff, cells: Cells) -> Table:
    """Rows of one rule stand under its name and its knob's, which need the width once only."""
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        min_width=min(100, len(title)),
    )
    table.add_column("rule and knob", overflow="fold", min_width=14)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    line = ""
    for number, row in enumerate(study.rows):
        point = row.point
        if point.knob and point.line != line:
            table.add_row(Text(f"{point.rule} {point.knob}"))
        line = point.line
        table.add_row(Text(f"  {point.value_text}" if point.knob else point.rule), *cells(number, row))
    return table


def _starred(text: str, star: bool) -> str:
    return text + ("*" if star else " ")


def _scaled(value: float) -> str:
    """Three digits and a power of a thousand: 31.5M."""
    for unit in _UNITS:
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000.0
    return f"{value:.3g}E"


def _share(value: float | None) -> str:
    return _DASH if value is None else f"{100 * value:.1f}"


def _gain(gain: Gain | None, form: str, scale: float = 1.0) -> tuple[str, str]:
    if gain is None:
        return _DASH, _DASH
    return form.format(scale * gain.mean + 0.0), _ends(gain.interval, form, scale)


def _ends(interval: Interval | None, form: str, scale: float = 1.0) -> str:
    if interval is None:
        return _DASH
    low, high = (form.format(scale * end + 0.0) for end in interval)
    return f"{low}…{high}"


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f}…{spread.high:.2f}" if spread.ranged else _DASH
