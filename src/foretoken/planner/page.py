"""The page of ``foretoken plan --report``: the ranking as bars, and the gain over context and number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from foretoken.planner.candidates import Candidate
from foretoken.planner.plan import Plan
from foretoken.planner.report import screen, short_name

_COLOURS = ("#3366aa", "#cc6633", "#339966", "#8855aa", "#777777")
_WIDTH, _HEIGHT, _LEFT, _ROW = 720, 240, 260, 26


def page(plan: Plan) -> bytes:
    """A self-contained page."""
    ranked = [each for each in plan.candidates if each.rate > 0.0]
    parts = [
        "<!doctype html><meta charset=utf-8><title>foretoken plan</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}svg text{font:13px sans-serif}"
        "pre{overflow-x:auto;background:#f4f4f4;padding:1em}</style>",
        f"<h1>{escape(plan.target['name'])}</h1><h2>Times plain decoding</h2>",
        "<p>Plain decoding computes one token a step. A method guesses the next ones cheaply, and the model checks all "
        "of them in one step; the text stays the same. Bars: measured in a dark colour, only predicted in a light "
        "one. The line is plain decoding.</p>",
        _bars(ranked[:12]),
    ]
    for title, name in (("tokens of context", "by_context"), ("requests together", "by_requests")):
        if any(len(getattr(each, name)) > 1 for each in ranked):
            parts += [f"<h2>Gain by {title}, decoding alone, predicted</h2>", _lines(ranked[:5], name)]
    parts += ["<h2>Report</h2>", f"<pre>{escape(chr(10).join(screen(plan)))}</pre>"]
    return "\n".join(parts).encode()


def _bars(ranked: Sequence[Candidate]) -> str:
    most = max([1.2, *(each.rate for each in ranked)])
    scale = (_WIDTH - _LEFT - 60) / most
    found = [f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(ranked) + 10}" width="100%">']
    for place, each in enumerate(ranked):
        y, colour = place * _ROW + 6, "#3366aa" if each.measured is not None else "#b5c7e3"
        found.append(
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(short_name(each))}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{each.rate * scale:.0f}" height="{_ROW - 8}" fill="{colour}"/>'
            f'<text x="{_LEFT + each.rate * scale + 6:.0f}" y="{y + 14}">{each.rate:.2f}</text>'
        )
    x = _LEFT + scale
    found.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{_ROW * len(ranked) + 10}" stroke="#333"/></svg>')
    return "".join(found)


def _lines(ranked: Sequence[Candidate], name: str) -> str:
    """Lines of the gain; places are spaced evenly, since they grow by factors."""
    series: list[dict[int, float]] = [getattr(each, name) for each in ranked]
    places = sorted({place for each in series for place in each})
    most = max([1.2, *(gain for each in series for gain in each.values())])

    def x(place: int) -> float:
        return 50 + places.index(place) * (_WIDTH - 330) / max(1, len(places) - 1)

    def y(gain: float) -> float:
        return _HEIGHT - 30 - gain / most * (_HEIGHT - 50)

    found = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%">']
    found.append(f'<line x1="50" x2="{_WIDTH - 280}" y1="{y(1):.0f}" y2="{y(1):.0f}" stroke="#333"/>')
    found.append(f'<text x="44" y="{y(1) + 4:.0f}" text-anchor="end">plain</text>')
    found += [f'<text x="{x(each):.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{each:,}</text>' for each in places]
    for number, (each, values) in enumerate(zip(ranked, series, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(place):.0f},{y(gain):.0f}" for place, gain in sorted(values.items()))
        found.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{_WIDTH - 265}" y="{20 + 20 * number}" fill="{colour}">{escape(short_name(each))}</text>'
        )
    return "".join([*found, "</svg>"])
