"""The benchmark as one HTML file: three pictures, each explained in a sentence, the tables, and the provenance.

Self-contained: pictures are inline SVG, no script, no network. Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from foretoken.bench.harness import BASELINE
from foretoken.bench.summary import SLOWDOWN

# Okabe and Ito: told apart by most colour-blind readers, and in grey
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31", "#666666")
_PARTS = {"draft": "#E69F00", "verify": "#0072B2", "other": "#AAAAAA"}
_MAX_DEPTH = 16
_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: #fff; color: #1c2430;
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; } .muted { color: #5b6675; }
.lead { font-size: 1.1rem; } figure { margin: 0; } svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .6rem 0; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #e3e7ec; white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid #c9d1da; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #b3261e; font-weight: 600; } .spread { color: #5b6675; font-size: .85em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .9rem; }
dt { color: #5b6675; } dd { margin: 0; overflow-wrap: anywhere; }
code { background: #f3f5f8; padding: .1em .35em; border-radius: 4px; font-size: .9em; }
"""


def html_report(results: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> str:
    """The whole report as HTML.

    Args:
        results: what :func:`foretoken.bench.summary.summarise` returned.
        provenance: what :func:`foretoken.core.provenance.provenance` returned.
    """
    methods = [result for result in results if result["method"] != BASELINE]
    sections = [_overall_section(results)]
    if methods:
        sections.append(
            _section(
                "Speed-up by method and category",
                "Tokens per second over plain decoding in the same run: above the line a method pays, below it costs. "
                "Bars are medians over the repeats, whiskers the lowest and the highest; hatched bars are slowdowns.",
                _picture("speedup", lambda axes: _draw_speedup(axes, methods), height=3.6),
                _category_table(results),
            )
        )
    if any(method["acceptance_by_position"] for method in methods):
        sections.append(
            _section(
                "Acceptance by position",
                "How often the draft was accepted as far as each position, among the steps that drafted so far; "
                "a line that falls slowly says that longer drafts are worth trying.",
                _picture("acceptance", lambda axes: _draw_acceptance(axes, methods), height=3.2),
            )
        )
    sections.append(
        _section(
            "Where the time goes",
            "Milliseconds per generated token, split into drafting, the target's forward with the verification, and "
            "everything else. The shorter the bar, the faster; plain decoding has nothing to draft.",
            _picture("time", lambda axes: _draw_time(axes, results), height=0.8 + 0.45 * len(results)),
        )
    )
    sections.append(_provenance_section(provenance))
    title = f"foretoken bench: {provenance['model']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{_lead(results, provenance)}\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _lead(results: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> str:
    suite = provenance["suite"]
    setting = (
        f"{suite['num_prompts']} prompts, {provenance['repeats']} repeats in interleaved order, "
        f"{provenance['dtype']}, {provenance['threads']} threads, temperature {provenance['temperature']:g}, "
        f"at most {provenance['max_tokens']} tokens each, batch {provenance['batch_size']}; {provenance['cpu']}."
    )
    measured = [result for result in results if result["method"] != BASELINE and result["speedup"] is not None]
    lead = "Only plain decoding was measured."
    if measured:
        best = max(measured, key=lambda result: result["speedup"])
        lead = f"Fastest: <strong>{escape(best['method'])}</strong>, {best['speedup']:.2f} times plain decoding."
        if best["speedup"] < 1:
            lead = f"Nothing was faster than plain decoding; {escape(best['method'])} came to {best['speedup']:.2f}x."
    cut = '<p class="bad">Interrupted: only complete rounds are counted.</p>' if provenance["interrupted"] else ""
    return f'<p class="lead">{lead}</p>{cut}<p class="muted">{escape(setting)}</p>'


def _overall_section(results: Sequence[dict[str, Any]]) -> str:
    heads = ("method", "speed-up", "tokens/s", "tokens/step", "accepted", "same tokens", "failed", "promise")
    rows = []
    for result in results:
        drafted = result["num_draft_tokens"]
        failed = result["failures"]
        rows.append(
            [
                escape(result["method"]),
                _speedup_cell(result),
                _number(result["tokens_per_second"], "{:.0f}"),
                _number(result["tokens_per_step"], "{:.2f}"),
                f"{result['num_accepted_tokens'] / drafted:.0%}" if drafted else "–",
                _number(result["equal_outputs"], "{:.0%}") if result["method"] != BASELINE else "–",
                f'<span class="bad">{failed}</span>' if failed else "0",
                escape(str(result["promise"] or "–")),
            ]
        )
    errors = "".join(
        f'<p class="bad">{escape(result["method"])}: prompt {escape(error["prompt"])} failed: '
        f"{escape(error['error'])}</p>"
        for result in results
        for error in result["errors"]
    )
    meaning = (
        "Tokens per step includes the bonus token (plain decoding is 1.00); “same tokens” is the share of answers "
        "equal to plain decoding's, which “same law” does not promise when sampling."
    )
    return _section("Overview", meaning, _table(heads, rows) + errors)


def _category_table(results: Sequence[dict[str, Any]]) -> str:
    categories = list(results[0]["by_category"])
    rows = [
        [escape(result["method"]), *(_speedup_cell(result["by_category"][name]) for name in categories)]
        for result in results
        if result["method"] != BASELINE
    ]
    plain = results[0]["by_category"]
    rows.append(
        [f"{BASELINE}, tokens/s", *(_number(plain[name]["tokens_per_second"], "{:.0f}") for name in categories)]
    )
    return _table(("method", *categories), rows)


def _provenance_section(provenance: dict[str, Any]) -> str:
    items = []
    for key, value in provenance.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {part}" for name, part in value.items())
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        shown = f"<code>{escape(str(value))}</code>" if key == "command" else escape(str(value))
        items.append(f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{shown}</dd>")
    return _section("Provenance", "What it takes to run this again.", f"<dl>{''.join(items)}</dl>")


def _section(title: str, sentence: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2><p>{sentence}</p>{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads are escaped here; cells are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _speedup_cell(figures: dict[str, Any]) -> str:
    value, spread = figures["speedup"], figures["spread"]["speedup"]
    if value is None:
        return "–"
    text = f"{value:.2f}x"
    if value < SLOWDOWN:
        text = f'<span class="bad">{text}</span>'
    if figures["num_repeats"] > 1:
        text += f' <span class="spread">{spread[0]:.2f}–{spread[1]:.2f}</span>'
    return text


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _picture(name: str, draw: Callable[[Any], None], *, height: float) -> str:
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
        figure = Figure(figsize=(9, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _draw_speedup(axes: Any, methods: Sequence[dict[str, Any]]) -> None:
    from matplotlib.patches import Patch

    categories = list(methods[0]["by_category"])
    groups = ["all", *categories] if len(categories) > 1 else ["all"]
    width = 0.8 / len(methods)
    for row, method in enumerate(methods):
        for place, group in enumerate(groups):
            figures = method if group == "all" else method["by_category"][group]
            value, spread = figures["speedup"], figures["spread"]["speedup"]
            if value is None:
                continue
            axes.bar(
                place - 0.4 + (row + 0.5) * width,
                value,
                width * 0.92,
                color=_COLOURS[row % len(_COLOURS)],
                hatch="////" if value < SLOWDOWN else None,
                edgecolor="white",
                linewidth=0,
                yerr=[[value - spread[0]], [spread[1] - value]],
                error_kw={"ecolor": "#333", "elinewidth": 0.9, "capsize": 2},
            )
    axes.axhline(1.0, color="#1c2430", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(
        handles=[
            Patch(color=_COLOURS[row % len(_COLOURS)], label=method["method"]) for row, method in enumerate(methods)
        ],
        frameon=False,
        ncols=min(len(methods), 4),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
    )


def _draw_acceptance(axes: Any, methods: Sequence[dict[str, Any]]) -> None:
    for row, method in enumerate(methods):
        rates = method["acceptance_by_position"][:_MAX_DEPTH]
        if rates:
            axes.plot(
                range(1, len(rates) + 1),
                rates,
                marker="o",
                markersize=4,
                color=_COLOURS[row % len(_COLOURS)],
                label=method["method"],
            )
    deepest = max(min(len(method["acceptance_by_position"]), _MAX_DEPTH) for method in methods)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#e3e7ec")
    axes.legend(frameon=False)


def _draw_time(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    shown = [result for result in results if result["num_tokens"]]
    left = [0.0] * len(shown)
    for part, colour in _PARTS.items():
        widths = [1000 * result["time"][part] / result["num_tokens"] for result in shown]
        axes.barh(range(len(shown)), widths, 0.62, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shown)), [result["method"] for result in shown])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per token")
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
