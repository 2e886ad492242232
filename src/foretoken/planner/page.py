"""The page of ``foretoken plan --report``: the ranking as bars, and the gain over context and number of requests."""

from collections.abc import Sequence
from html import escape

from foretoken.planner.candidates import Candidate
from foretoken.planner.plan import Plan
from foretoken.planner.report import screen, short_name

_COLOURS = ("#3366aa", "#cc6633", "#339966", "#8855aa", "#777777")
_WIDTH, _HEIGHT, _LEFT = 360, 190, 44
_LONGEST = 60  # characters of a name
_STYLE = """\
body{font:16px/1.5 sans-serif;max-width:60em;margin:1em auto;padding:0 1em}h1,h2{line-height:1.2}
svg{display:block;width:100%;max-width:34em}svg text{font:12px sans-serif}
table{border-collapse:collapse}th{text-align:left;font-weight:normal}td{padding:.15em .3em;text-align:right}
.bars{width:100%;table-layout:fixed}.bars th{width:38%;overflow-wrap:anywhere}.bars td:last-child{width:3em}
td div{height:1.1em;background:#b5c7e3}
.measured{background:#3366aa}pre{overflow-x:auto;background:#f4f4f4;padding:1em;font-size:13px}"""


def page(plan: Plan) -> bytes:
    """A self-contained page."""
    ranked = [each for each in plan.candidates if each.rate > 0.0]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>foretoken plan</title><style>{_STYLE}</style>",
        f"<h1>{escape(plan.target['name'])}</h1><h2>How many times as fast as plain decoding</h2>",
        "<p>Plain decoding computes one token a step. A method guesses the next tokens cheaply, and the model checks "
        "all of them in one step; the text stays the same. Dark bars were measured and come first, light ones were "
        "only predicted. The vertical line is plain decoding.</p>",
        _bars(ranked[:12]),
    ]
    for title, name in (("tokens of context", "by_context"), ("number of requests at once", "by_requests")):
        drawn = [each for each in ranked if len(getattr(each, name)) > 1][: len(_COLOURS)]
        if drawn:
            parts += [f"<h2>The same by {title}</h2><p>Predicted, without reading prompts.</p>", _lines(drawn, name)]
    parts += ["<h2>The report as text</h2>", f"<pre>{escape(chr(10).join(screen(plan)))}</pre></html>"]
    return "\n".join(parts).encode()


def _bars(ranked: Sequence[Candidate]) -> str:
    most = max([1.2, *(each.rate for each in ranked)])
    plain = f"calc({100 / most:.1f}% - 1px),#333 0,#333 {100 / most:.1f}%"
    found = ["<table class=bars>"]
    for each in ranked:
        kind = "" if each.measured is None else " class=measured"
        bar = f"<div{kind} style='width:{100 * each.rate / most:.1f}%'></div>"
        found.append(f"<tr><th>{_name(each)}<td>{bar}<td>{each.rate:.2f}")
    line = f"background:linear-gradient(90deg,transparent {plain},transparent 0)"
    return "".join([*found, f"</table><style>.bars td:nth-child(2){{padding:.15em 0;{line}}}</style>"])


def _name(each: Candidate) -> str:
    return escape(short_name(each, _LONGEST).replace("+", " + ", 1))


def _lines(drawn: Sequence[Candidate], name: str) -> str:
    """Lines of the gain, with its values; places are spaced evenly, since they grow by factors."""
    series: list[dict[int, float]] = [getattr(each, name) for each in drawn]
    places = sorted({place for each in series for place in each})
    most = max([1.2, *(gain for each in series for gain in each.values())])

    def x(place: int) -> float:
        return _LEFT + places.index(place) * (_WIDTH - _LEFT - 30) / max(1, len(places) - 1)

    def y(gain: float) -> float:
        return _HEIGHT - 24 - gain / most * (_HEIGHT - 40)

    found = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">']
    for gain, label in ((1.0, "plain"), (most, f"{most:.1f}x")):
        found.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 30}" y1="{y(gain):.0f}" y2="{y(gain):.0f}" stroke="#aaa"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{y(gain) + 4:.0f}" text-anchor="end">{label}</text>')
    found += [f'<text x="{x(each):.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{each:,}</text>' for each in places]
    legend = ["<tr><th>", *(f"<td>{place:,}" for place in places)]
    for colour, each, values in zip(_COLOURS, drawn, series, strict=False):
        points = " ".join(f"{x(place):.0f},{y(gain):.0f}" for place, gain in sorted(values.items()))
        found.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend.append(f"<tr><th style='color:{colour}'>{_name(each)}")
        legend += [f"<td>{values[place]:.1f}" if place in values else "<td>" for place in places]
    return "".join([*found, "</svg><table>", *legend, "</table>"])
