"""The study in two pictures for each temperature and top_p: acceptance against n, and what each rule leaves unused.

Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken_lab.studies.acceptance.study import Setting

# Okabe and Ito: distinct for most colour-blind readers, and in grey
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_COLOURS = dict(zip(("iid", "without_replacement", "greedy", "topk", "hub"), COLOURS, strict=False))
_MARKERS = {
    "naive": "v",
    "recursive": "o",
    "kseq": "s",
    "greedy_draft": "D",
    "spechub": "P",
    "ratio": "*",
    "transport": "",
}


_SPREAD = 0.3  # bars of one n stand side by side over so much of the axis

Lines = dict[tuple[str, str], list[tuple[int, float, Any]]]  # (rule, scheme) -> (n, value, interval or None)


def draw(settings: Sequence[Setting], folder: Path) -> list[Path]:
    """Write ``acceptance_T*_p*.png`` and ``gap_T*_p*.png`` into a folder that exists; the files.

    Raises:
        ForetokenError: a file cannot be written.
    """
    written = []
    for temperature, top_p in dict.fromkeys((each.temperature, each.top_p) for each in settings):
        chosen = [each for each in settings if (each.temperature, each.top_p) == (temperature, top_p)]
        for kind, plot in (("acceptance", _plot_acceptance), ("gap", _plot_gap)):
            path = folder / f"{kind}_T{temperature:g}_p{top_p:g}.png"
            try:
                path.write_bytes(_picture(plot, chosen))
            except OSError as error:
                raise ForetokenError(f"{path}: cannot be written ({error.strerror or error})") from None
            written.append(path)
    return written


def _picture(plot: Any, settings: Sequence[Setting]) -> bytes:
    """Draw into a figure of its own (no global pyplot state) and return it as PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.add_subplot()
        plot(axes, settings)
        first = settings[0]
        axes.set_title(
            f"temperature {first.temperature:g}, top_p {first.top_p:g}: {first.num_positions} positions of "
            f"{first.num_prompts} prompts",
            loc="left",
        )
        axes.grid(axis="y", color="#e3e7ec")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _plot_acceptance(axes: Any, settings: Sequence[Setting]) -> None:
    for scheme in dict.fromkeys(name for each in settings for name in each.bounds):
        optima = [(each.num_drafts, each.bounds[scheme][0]) for each in settings if scheme in each.bounds]
        axes.plot(
            *zip(*optima, strict=True), linestyle="--", zorder=5, color=_COLOURS[scheme], label=f"optimum, {scheme}"
        )
    _errorbars(axes, _lines(settings, "acceptance", "interval"))
    axes.set_ylabel("acceptance (95 % by prompt)")
    _count_axis(axes, settings)


def _plot_gap(axes: Any, settings: Sequence[Setting]) -> None:
    _errorbars(axes, _lines(settings, "gap", "gap_interval"), scale=100.0)
    axes.axhline(0.0, color="#1c2430", linewidth=1, linestyle="--")
    axes.set_ylabel("points below the optimum of the scheme")
    _count_axis(axes, settings)


def _lines(settings: Sequence[Setting], value: str, ends: str) -> Lines:
    lines: Lines = {}
    for each in settings:
        for row in each.rows:
            if row.rule != "transport":  # the bound itself
                point = (each.num_drafts, getattr(row, value), getattr(row, ends))
                lines.setdefault((row.rule, row.scheme), []).append(point)
    return lines


def _errorbars(axes: Any, lines: Lines, scale: float = 1.0) -> None:
    for number, ((name, scheme), points) in enumerate(lines.items()):
        shift = _SPREAD * (number / max(1, len(lines) - 1) - 0.5)
        errors = [
            [0.0 if ends is None else scale * (value - ends[0]) for _, value, ends in points],
            [0.0 if ends is None else scale * (ends[1] - value) for _, value, ends in points],
        ]
        axes.errorbar(
            [n + shift for n, _, _ in points],
            [scale * value for _, value, _ in points],
            yerr=errors,
            marker=_MARKERS.get(name, "x"),
            markersize=4,
            linewidth=1.0,
            elinewidth=0.6,
            color=_COLOURS[scheme],
            label=f"{name}, {scheme}",
        )


def _count_axis(axes: Any, settings: Sequence[Setting]) -> None:
    axes.set_xticks(sorted({each.num_drafts for each in settings}))
    axes.set_xlabel("drafts at a position")
