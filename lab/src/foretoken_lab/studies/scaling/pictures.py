"""The distributions in pictures: points, fit, band of all fits without one point; and predicted against measured speed.

Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
from typing import Any

from foretoken_lab.studies.acceptance.pictures import COLOURS
from foretoken_lab.studies.scaling.laws import LAWS, Fit, fit_log
from foretoken_lab.studies.scaling.study import Study

_SIZE = (4.6, 3.6)  # inches of a panel
_SAMPLES = 60
_LABELS = {
    "data": ("training tokens", "tokens per step"),
    "capacity": ("decoder layers", "tokens per step"),
    "batch": ("requests at once", "tokens per second"),
}


def draw(study: Study, title: str) -> bytes:
    """All panels as one PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = len(study.fits) + bool(study.speed.settings)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(_SIZE[0] * max(1, panels), _SIZE[1]), layout="constrained")
        axes = list(figure.subplots(1, max(1, panels), squeeze=False)[0])
        for axis, fit in zip(axes, study.fits.values(), strict=False):
            _law(axis, fit)
        if study.speed.settings:
            _speed(axes[-1], study)
        figure.suptitle(title, x=0.01, ha="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _law(axis: Any, fit: Fit) -> None:
    low, high = min(fit.xs), max(fit.xs)
    grid = [low * (high / low) ** (step / (_SAMPLES - 1)) for step in range(_SAMPLES)]
    axis.plot(grid, [fit.at(x)[0] for x in grid], color=COLOURS[0], label=f"R² {fit.r2:.2f}" if fit.r2 else "fit")
    if len(fit.xs) > 4:  # without one point there are still as many as a distribution wants
        law = LAWS[fit.law]
        others = [
            fit_log(law, [*fit.xs[:i], *fit.xs[i + 1 :]], [*fit.ys[:i], *fit.ys[i + 1 :]]) for i in range(len(fit.xs))
        ]
        lines = [[other.at(x)[0] for other in others] for x in grid]
        axis.fill_between(grid, [min(at) for at in lines], [max(at) for at in lines], color=COLOURS[0], alpha=0.2)
    axis.plot(fit.xs, fit.ys, "o", color=COLOURS[1])
    axis.plot(fit.held_out["x"], fit.held_out["predicted"], "x", color=COLOURS[1], label="largest, predicted")
    axis.set_xscale("log")
    axis.set_xlabel(_LABELS[fit.law][0])
    axis.set_ylabel(_LABELS[fit.law][1])
    axis.set_title(f"{fit.law}: {fit.form.partition(',')[0]}", loc="left", fontsize=8)
    axis.legend(frameon=False, fontsize=8)


def _speed(axis: Any, study: Study) -> None:
    for colour, batch in zip(COLOURS, sorted({each.batch for each in study.speed.settings}), strict=False):
        here = [each for each in study.speed.settings if each.batch == batch]
        axis.plot(
            [each.measured for each in here],
            [each.predicted for each in here],
            "o",
            color=colour,
            label=f"{batch} request{'s' * (batch > 1)}",
        )
    most = max(max(each.measured, each.predicted) for each in study.speed.settings)
    axis.plot([0, most], [0, most], color="#6b7480", linewidth=1)
    axis.set_xlabel("measured tokens per second")
    axis.set_ylabel("predicted")
    axis.set_title("speed model", loc="left", fontsize=8)
    axis.legend(frameon=False, fontsize=8)
