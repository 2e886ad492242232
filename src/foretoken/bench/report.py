"""The benchmark as one HTML file: a picture for every comparison, the tables, answers side by side, and the provenance.

Self-contained: pictures are inline SVG, each drawn twice, for wide and for narrow screens; no script, no network. Needs
matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from foretoken.bench.harness import BASELINE
from foretoken.bench.sheets import FEW, MAX_DEPTH, Cell, Sheet, groups_of, in_words, settings_of, sheets
from foretoken.bench.suite import Column, Section
from foretoken.bench.summary import SLOWDOWN

# Okabe and Ito: told apart by most colour-blind readers, and in grey
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31", "#666666")
_PARTS = {"draft": "#E69F00", "verify": "#0072B2", "other": "#AAAAAA"}
_MEMORY = {"cache_bytes": ("target's cache", "#0072B2"), "drafter_bytes": ("drafter", "#E69F00")}
_WAITS = {
    "first_token_seconds": "first token",
    "between_tokens_seconds": "between tokens",
    "answer_seconds": "whole answer",
}
_LETTERS = 100  # of a wide picture's legend side by side
_LONG, _LONG_IN_LEGEND = 18, 36  # letters of a method's name beside its bar and in a legend, then it is folded
_WIDE, _NARROW = 9.0, 4.4  # inches: letters of 10 points are read on a desk's screen, and on a telephone's
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: #fff; color: #1c2430;
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .3rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; } .muted { color: #5b6675; }
.lead { font-size: 1.1rem; } figure { margin: 0 0 .6rem; } svg { width: 100%; height: auto; display: block; }
.narrow { display: none; }
@media (max-width: 40rem) { .wide { display: none; } .narrow { display: block; } body { padding: 1.2rem .9rem 3rem; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .6rem 0; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #e3e7ec; white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid #c9d1da; white-space: normal; vertical-align: bottom; min-width: 4rem; }
th.name, td.name { text-align: left; }
tr.begins td { border-top: 2px solid #e3e7ec; }
.bad { color: #b3261e; font-weight: 600; } .doubtful { color: #8a6100; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); gap: .8rem; }
.answer { border: 1px solid #e3e7ec; border-radius: 6px; padding: .6rem .8rem; min-width: 0; }
.answer h4 { margin: 0 0 .4rem; font-size: .85rem; color: #5b6675; overflow-wrap: anywhere; }
.answer div, .asked { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .92rem; }
.asked { border-left: 3px solid #c9d1da; padding-left: .8rem; max-height: 12rem; overflow-y: auto; }
mark { background: #d9ecdf; color: inherit; border-bottom: 2px solid #009E73; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .9rem; }
dt { color: #5b6675; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  table { font-size: .82rem; } th, td { padding: .3rem .35rem; }
  td.name:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 6.8rem; max-width: 8rem; }
}
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
code { background: #f3f5f8; padding: .1em .35em; border-radius: 4px; font-size: .9em; }
"""


def html_report(
    results: Sequence[dict[str, Any]],
    provenance: dict[str, Any],
    samples: Sequence[Mapping[str, Any]] = (),
    columns: Sequence[Column] = (),
    sections: Sequence[Section] = (),
) -> str:
    """The whole report as HTML.

    Args:
        results: what :func:`foretoken.bench.summary.summarise` returned, of one setting after the other.
        provenance: what :func:`foretoken.core.provenance.provenance` returned.
        samples: what :func:`foretoken.bench.samples.side_by_side` returned.
        columns, sections: a suite's own; see :func:`foretoken.bench.sheets.sheets`.
    """
    pictures = _pictures(results)
    parts = []
    for sheet in sheets(results, columns, sections):
        heading, sentence, picture = pictures.pop(sheet.title, (_capital(sheet.title), "", ""))
        shown = "".join(_paragraph(text) for text in (sentence, sheet.meaning))
        parts.append(
            f"<section><h2>{escape(heading)}</h2>{shown}{picture}{_table(sheet)}{_errors(sheet, results)}</section>"
        )
    if samples:
        parts.append(_side_by_side(samples))
    parts.append(_provenance_section(provenance))
    title = f"foretoken bench: {provenance['model']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{_lead(results, provenance)}\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _pictures(results: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str, str]]:
    """By the title of the sheet that a picture belongs to: heading, a sentence, and the picture."""
    methods = [result for result in results if result["method"] != BASELINE]
    found: dict[str, tuple[str, str, str]] = {}
    if len(settings_of(results)) > 1:
        if methods:
            found["by batch size and prompt length"] = (
                "Speed-up by batch size and prompt length",
                "A line for every method and length; above the broken line it pays. Whiskers are the lowest and the "
                "highest repeat.",
                _picture("grid", "speed-up by batch size and prompt length", _draw_grid, methods, lambda wide: 3.4),
            )
        return found
    num_groups = len(groups_of(results[0])) if results else 0
    num_bars = num_groups * len(methods)
    if methods:
        found["speed-up by category, and decoding, apart from reading the prompt"] = (
            "Speed-up by method and category",
            "Tokens per second over plain decoding in the same run: above the line a method pays, below it costs. "
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
        found["what a reader waits for, milliseconds"] = (
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
        found["acceptance by position in the draft"] = (
            "Acceptance by position",
            "A line that falls slowly says that longer drafts are worth trying; a hollow mark stands on fewer than "
            f"{FEW} observations.",
            _picture("acceptance", "acceptance by position in the draft", _draw_acceptance, methods, lambda wide: 3.2),
        )
    shown = _picture("time", "time by method", _draw_time, results, lambda wide: 1.0 + 0.4 * len(results))
    if any(result.get("memory") for result in results):
        shown += _picture("memory", "memory by method", _draw_memory, results, lambda wide: 1.0 + 0.4 * len(results))
    found["where time and memory go"] = (
        "Where the time goes",
        "Milliseconds per generated token: the shorter the bar, the faster; plain decoding has nothing to draft.",
        shown,
    )
    return found


def _lead(results: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> str:
    measured = [result for result in results if result["method"] != BASELINE and result["speedup"] is not None]
    lead = "Only plain decoding was measured."
    if measured:
        best = max(measured, key=lambda result: result["speedup"])
        where = "" if len(settings_of(results)) < 2 else f", at batch {best['batch_size']}"
        lead = f"Fastest: <strong>{escape(best['method'])}</strong>, {best['speedup']:.2f} times plain decoding{where}."
        if best["speedup"] < 1:
            lead = f"Nothing was faster than plain decoding; {escape(best['method'])} came to {best['speedup']:.2f}x."
        if best["num_repeats"] < 2:
            lead += " It was measured once: nothing says how far another run would be from that."
    cut = '<p class="bad">Interrupted: only complete rounds are counted.</p>' if provenance["interrupted"] else ""
    return f'<p class="lead">{lead}</p>{cut}<p class="muted">{escape(in_words(provenance))}.</p>'


def _side_by_side(samples: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for sample in samples:
        answers = "".join(
            f'<div class="answer"><h4>{escape(answer["method"])}</h4><div>{_marked(answer)}</div></div>'
            for answer in sample["answers"]
        )
        parts.append(
            f'<h3>{escape(sample["category"])}</h3><p class="asked muted">{escape(sample["text"])}</p>'
            f'<div class="answers">{answers}</div>'
        )
    return (
        "<section><h2>Answers side by side</h2><p>The first prompt of each category. <mark>Marked</mark> is what the "
        f"draft wrote and the target accepted; the rest is the target's own.</p>{''.join(parts)}</section>"
    )


def _marked(answer: Mapping[str, Any]) -> str:
    if answer["error"] is not None:
        return f'<span class="bad">failed: {escape(answer["error"])}</span>'
    text = "".join(
        f"<mark>{escape(piece['text'])}</mark>" if piece["drafted"] else escape(piece["text"])
        for piece in answer["pieces"]
    )
    return text + (" …" if answer["cut"] else "")


def _provenance_section(provenance: dict[str, Any]) -> str:
    items = []
    for key, value in provenance.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name.replace('_', ' ')} {part}" for name, part in value.items())
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        shown = f"<code>{escape(str(value))}</code>" if key == "command" else escape(str(value))
        items.append(f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{shown}</dd>")
    return f"<section><h2>Provenance</h2><p>What it takes to run this again.</p><dl>{''.join(items)}</dl></section>"


def _errors(sheet: Sheet, results: Sequence[dict[str, Any]]) -> str:
    if "failed" not in sheet.heads:
        return ""
    return "".join(
        f'<p class="bad">{escape(result["method"])}: prompt {escape(error["prompt"])} failed: '
        f"{escape(error['error'])}</p>"
        for result in results
        for error in result["errors"]
    )


def _table(sheet: Sheet) -> str:
    names = range(sheet.labels)
    head = "".join(f"<th{_name(place in names)}>{_unbroken(text)}</th>" for place, text in enumerate(sheet.heads))
    body = "".join(
        f"<tr{_begins(sheet, row)}>"
        + "".join(f"<td{_name(place in names)}>{_cell(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in sheet.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _unbroken(head: str) -> str:
    """Words of a heading may stand below each other, but are not parted at a hyphen."""
    return escape(head).replace("-", "&#8209;")


def _name(named: bool) -> str:
    return ' class="name"' if named else ""


def _begins(sheet: Sheet, row: Sequence[Cell]) -> str:
    return ' class="begins"' if sheet.labels > 1 and row[0].text else ""


def _cell(cell: Cell) -> str:
    kind = "bad" if cell.bad else "doubtful" if cell.doubtful else ""
    text = escape(cell.text).replace("+", "<wbr>+")  # where a method's name may be broken
    return f'<span class="{kind}">{text}</span>' if kind else text


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------------- the pictures


def _picture(
    name: str,
    label: str,
    draw: Callable[..., None],
    results: Sequence[dict[str, Any]],
    height: Callable[[bool], float],
    *,
    panels: int = 1,
) -> str:
    """Drawn for a wide and for a narrow screen, whose style shows one of them.

    Args:
        draw: is given the axes, the ``results``, and whether the picture is ``wide``.
        height: of a wide or a narrow one, in inches.
        panels: axes, side by side where it is wide.
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
    """Draw into a figure of its own (no global pyplot state) and return it as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",  # text stays text: small, sharp and searchable
        "svg.hashsalt": name,  # ids differ between pictures, and are the same in every run
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
    """Upright bars where there is room for them, else lying ones."""
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
    _stacked(panels[0], shown, parts, "MB, beside the target's weights")


def _stacked(
    axes: Any,
    results: Sequence[dict[str, Any]],
    parts: Mapping[str, tuple[str, str, Sequence[float]]],
    unit: str,
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
    """The methods' names beside lying bars, long ones folded and small; none where there are no results."""
    names = [result["method"] for result in results] or [""] * count
    folded = [_folded(name, _LONG) for name in names]
    axes.set_yticks(range(count), folded, fontsize=10 if folded == names else 7)


def _folded(name: str, most: int) -> str:
    """A method with its settings, in lines of so many letters where its parts allow it."""
    lines = [""]
    for piece in name.split("+"):
        joined = f"{lines[-1]}+{piece}" if lines[-1] else piece
        if lines[-1] and len(joined) > most:
            lines.append(f"+{piece}")
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _draw_grid(panels: Sequence[Any], results: Sequence[dict[str, Any]], wide: bool) -> None:
    """Over the batch size, with a line for each length; over the length where there is one batch size."""
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
    axes.set_xlabel("prompts that run together" if across == "batch_size" else "tokens of a prompt")
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    _legend(axes, wide)


def _legend(axes: Any, wide: bool, handles: Any = None) -> None:
    """Above the picture, where it covers nothing."""
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
