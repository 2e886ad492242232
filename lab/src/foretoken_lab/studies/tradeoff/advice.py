"""What a trade-off shows, in a few sentences that claim no difference which intervals and ranges do not show.

A point is *faster* than another if its speed was higher in every repeat and the interval of the ratio over blocks of
questions lies above 1: with many points and few repeats, one of the two is easily had by chance. A lossy point is
*worse* if the interval of its paired difference from exact verification lies below 0. All other pairs are tied.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken_lab.studies.tradeoff.points import PLAIN
from foretoken_lab.studies.tradeoff.study import Gain, Row, Spread, Tradeoff, quality_gain

_NAMED = 3  # points that a sentence lists

_UNITS = {"accuracy": "points of accuracy", "rougeL": "points of ROUGE-L", "nll": "nats a token"}


def advice(study: Tradeoff) -> str:
    """The choice among lossy points, next to exact verification."""
    lossy = [row for row in study.rows if row.point.lossy]
    exact, plain = study.exact, study.row(PLAIN)
    sentences = [] if exact is None or plain is None else [_on_exact(exact, plain)]
    if not lossy:
        return " ".join(sentences)
    if study.num_repeats < 2:
        return " ".join([*sentences, "One repeat has no range, so no rule counts as faster: use --repeats 3."])
    faster = [row for row in lossy if _is_faster(row)]
    worse = [row for row in faster if _is_worse(row, study.measure)]
    safe = [row for row in faster if row not in worse]
    if not faster:
        sentences.append(_on_none([row for row in lossy if row.against_exact.low > 1.0]))
    elif not safe:
        sentences.append(
            "Every lossy point that is shown to be faster than exact verification is worse than it: "
            f"{_losses(worse, study.measure)}."
        )
    else:
        sentences.append(_on_safe(safe, study.measure))
        if worse:
            sentences.append(f"Faster, and shown to be worse: {_losses(worse, study.measure)}.")
    return " ".join(sentences)


def _on_exact(exact: Row, plain: Row) -> str:
    spread, gain = exact.against_plain, plain.gain_in_speed
    if not spread.ranged:
        return f"Exact verification{_with(exact)} ran at {spread.middle:.2f} times the speed of plain decoding."
    verdict = "tied in speed with"
    if gain is not None and gain.interval is not None:
        if spread.low > 1.0 > gain.interval[1]:
            verdict = "faster than"
        elif spread.high < 1.0 < gain.interval[0]:
            verdict = "slower than"
    return f"Exact verification{_with(exact)} is {verdict} plain decoding, {_times(spread)}."


def _with(exact: Row) -> str:
    """The draft length at which exact verification was fastest, where that was given."""
    return f" at its best, with {exact.point.setting}," if exact.point.setting else ""


def _on_none(nearly: Sequence[Row]) -> str:
    text = "No lossy rule is shown to be faster than exact verification, so no trade is shown"
    if nearly:
        text += f"; in every repeat, but not clearly over the blocks of questions: {_labels(nearly)}"
    return text + "."


def _on_safe(safe: Sequence[Row], measure: str) -> str:
    best = max(safe, key=lambda row: row.against_exact.middle)
    text = f"{best.point.label} runs at {_times(best.against_exact)} the speed of exact verification"
    if best.against_plain.low <= 1.0:  # else a gain over a slow exact verification would look like one over plain
        text += f" (of plain decoding: {_times(best.against_plain)})"
    gain = quality_gain(best, measure)
    if gain is None or gain.interval is None:
        text += "; too few questions to compare its quality"
    elif gain.interval[0] > 0.0:
        text += f"; it gains {_amount(gain, measure)} over it on these questions"
    else:
        text += f" and is tied with it in quality: {_amount(gain, measure)}"
        if gain.interval[0] < 0.0:
            text += f", so a loss of {_scaled(-gain.interval[0], measure)} is not ruled out"
    nll = best.quality.nll_gain
    if measure != "nll" and nll is not None and nll.interval is not None and nll.interval[0] > 0.0:
        text += f"; its outputs are less probable under the target, by {nll.mean:.3f} nats a token"
    # speeds of two lossy points are compared by their ranges only: nearer than that is noise
    rivals = [row for row in safe if row is not best and row.against_exact.high >= best.against_exact.low]
    if rivals:
        text += f". In speed it is tied with {_labels(rivals)}"
    return text + "."


def _is_faster(row: Row) -> bool:
    gain = row.gain_in_speed
    return row.against_exact.low > 1.0 and gain is not None and gain.interval is not None and gain.interval[0] > 1.0


def _is_worse(row: Row, measure: str) -> bool:
    gain = quality_gain(row, measure)
    return gain is not None and gain.interval is not None and gain.interval[1] < 0.0


def _losses(rows: Sequence[Row], measure: str) -> str:
    ordered = sorted(rows, key=lambda row: -row.against_exact.middle)
    parts = []
    for row in ordered[:_NAMED]:
        gain = quality_gain(row, measure)
        assert gain is not None
        parts.append(f"{row.point.label} ({_amount(gain, measure)})")
    return ", ".join(parts) + _and_more(len(rows))


def _labels(rows: Sequence[Row]) -> str:
    return ", ".join(row.point.label for row in rows[:_NAMED]) + _and_more(len(rows))


def _and_more(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""


def _times(spread: Spread) -> str:
    return f"{spread.middle:.2f} ({spread.low:.2f} to {spread.high:.2f}) times"


def _amount(gain: Gain, measure: str) -> str:
    scale = 1.0 if measure == "nll" else 100.0
    form = "{:+.3f}" if measure == "nll" else "{:+.1f}"
    text = f"{form.format(scale * gain.mean)} {_UNITS[measure]}"
    if gain.interval is not None:
        low, high = (form.format(scale * end) for end in gain.interval)
        text += f", 95 % {low} to {high}"
    return text


def _scaled(value: float, measure: str) -> str:
    return f"{value:.3f} {_UNITS[measure]}" if measure == "nll" else f"{100 * value:.1f} {_UNITS[measure]}"
