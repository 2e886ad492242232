"""Acceptance of every rule on real prompts, over a grid of settings, with intervals over independent units.

Positions of one answer resemble each other, prompts are drawn apart: the prompts are the independent units. A figure is
the mean over prompts of each prompt's mean over its positions, and its interval is Student's over the prompts. Two
rules are compared by their difference prompt by prompt: what makes a prompt easy for both cancels out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretoken_lab.intervals import mean_interval
from foretoken_lab.studies.acceptance.observe import Observed
from foretoken_lab.studies.acceptance.optimal import optimal_acceptance
from foretoken_lab.studies.acceptance.rules import Rule, Sampling, rules_for

# the solved transport problem is the bound itself: it is shown, but the choice is among rules of linear cost
_IDEAL = "transport"
_SAME = 1e-7  # the same arithmetic, up to rounding and the search for the optimum

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule in one setting; rates are means over prompts.

    Attributes:
        acceptance: the chance that the emitted token is one of the drafts.
        interval: of it, 95 %; None with fewer than two prompts.
        bound: the optimum of the scheme.
        gap: bound - acceptance.
        gap_interval: of it, by prompt.
        sampled: averaged over sampled drafts (unbiased), else exact.
    """

    rule: str
    scheme: str
    acceptance: float
    interval: Interval | None
    bound: float
    gap: float
    gap_interval: Interval | None
    sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the grid.

    Attributes:
        rows: every rule that takes so many drafts.
        bounds: scheme -> optimum and its interval.
        best: index of the row with the highest acceptance, `transport` aside.
        equals: other rows that accept the same at every prompt.
        rivals: (row, difference to the best, interval): those with 0 in their paired interval.
        advice: the choice in plain words.
    """

    temperature: float
    top_p: float
    num_drafts: int
    num_prompts: int
    num_positions: int
    rows: tuple[Row, ...]
    bounds: dict[str, tuple[float, Interval | None]]
    best: int
    equals: tuple[int, ...]
    rivals: tuple[tuple[int, float, Interval], ...]
    advice: str

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "num_drafts": self.num_drafts,
            "num_prompts": self.num_prompts,
            "num_positions": self.num_positions,
            "bounds": {name: {"acceptance": mean, "interval": ends} for name, (mean, ends) in self.bounds.items()},
            "rules": [{name: getattr(row, name) for name in Row.__slots__} for row in self.rows],
            "best": [{"rule": self.rows[i].rule, "scheme": self.rows[i].scheme} for i in (self.best, *self.equals)],
            "not_distinguished": [
                {"rule": self.rows[i].rule, "scheme": self.rows[i].scheme, "difference": mean, "interval": ends}
                for i, mean, ends in self.rivals
            ],
            "advice": self.advice,
        }


def study(
    observed: Iterable[Observed],
    num_drafts: Sequence[int],
    *,
    temperature: float,
    top_p: float,
    num_samples: int,
    seed: int,
) -> list[Setting]:
    """Every rule at every observed position, for one temperature and top_p.

    Args:
        observed: positions of one sampling setting; consumed prompt by prompt.
        num_drafts: the values of n.
        temperature, top_p: of the distributions, to be named in the result.
        num_samples: of the rules without a closed form.
        seed: of their sampling.
    Returns:
        one setting for each n.
    """
    sampling = Sampling(num_samples, torch.Generator().manual_seed(seed))
    # key -> one mean per prompt; a key is (n, rule) or (n, scheme)
    rates: dict[tuple[int, Rule | str], list[float]] = {}
    counts: list[int] = []
    for laws in observed:
        counts.append(len(laws.positions))
        p_MV, q_MV = laws.p_MV.double(), laws.q_MV.double()
        p_MV, q_MV = p_MV / p_MV.sum(-1, keepdim=True), q_MV / q_MV.sum(-1, keepdim=True)
        for n in num_drafts:
            bounds = {}
            for rule in rules_for(n):
                if rule.scheme not in bounds:
                    bounds[rule.scheme] = optimal_acceptance(p_MV, q_MV, n, rule.scheme)
                    rates.setdefault((n, rule.scheme), []).append(float(bounds[rule.scheme].mean()))
                value_M = bounds[rule.scheme] if rule.name == _IDEAL else rule.acceptance(p_MV, q_MV, n, sampling)
                rates.setdefault((n, rule), []).append(float(value_M.mean()))
    return [_setting(n, rates, counts, temperature, top_p) for n in num_drafts] if counts else []


def _setting(
    n: int, rates: dict[tuple[int, Rule | str], list[float]], counts: list[int], temperature: float, top_p: float
) -> Setting:
    rules = rules_for(n)
    rows = []
    for rule in rules:
        values, bounds = rates[n, rule], rates[n, rule.scheme]
        acceptance, interval = _rate(values)
        gap, gap_interval = mean_interval([b - a for a, b in zip(values, bounds, strict=True)])
        rows.append(
            Row(
                rule=rule.name,
                scheme=rule.scheme,
                acceptance=acceptance,
                interval=interval,
                bound=mean_interval(bounds)[0],
                gap=gap,
                gap_interval=gap_interval,
                sampled=rule.sampled and n > 1,
            )
        )
    real = [i for i, row in enumerate(rows) if row.rule != _IDEAL]
    highest = max(rows[i].acceptance for i in real)
    best = next(i for i in real if rows[i].acceptance > highest - _SAME)  # not by rounding
    equals, rivals = [], []
    for i in real:
        ahead = [a - b for a, b in zip(rates[n, rules[best]], rates[n, rules[i]], strict=True)]
        mean, ends = mean_interval(ahead)
        if i != best and max(map(abs, ahead)) < _SAME:
            equals.append(i)
        elif i != best and ends is not None and ends[0] <= 0.0:
            rivals.append((i, mean, ends))
    return Setting(
        temperature=temperature,
        top_p=top_p,
        num_drafts=n,
        num_prompts=len(counts),
        num_positions=sum(counts),
        rows=tuple(rows),
        bounds={rule.scheme: _rate(rates[n, rule.scheme]) for rule in rules},
        best=best,
        equals=tuple(equals),
        rivals=tuple(rivals),
        advice=_advice(rows, [best, *equals], [i for i, _, _ in rivals], len(counts)),
    )


def _rate(values: Sequence[float]) -> tuple[float, Interval | None]:
    """The mean of rates; Student's interval knows nothing of their bounds, and is cut there."""
    mean, ends = mean_interval(values)
    return mean, ends and (max(0.0, ends[0]), min(1.0, ends[1]))


def _advice(rows: Sequence[Row], best: Sequence[int], rivals: Sequence[int], num_prompts: int) -> str:
    first = rows[best[0]]
    text = f"{_name(first)} drafts accepts most, {first.acceptance:.1%}"
    if len(best) > 1:
        text += f" (the same: {', '.join(_name(rows[i]) for i in best[1:])})"
    if num_prompts < 2:
        return text + ", on one prompt, which says nothing of others"
    if rivals:
        text += f"; on these prompts it is tied with {', '.join(_name(rows[i]) for i in rivals)}"
    ideal = max(rows, key=lambda row: row.bound)
    if ideal.bound - first.acceptance > 5e-4:
        text += f"; the optimum of {ideal.scheme} drafts is {100 * (ideal.bound - first.acceptance):.1f} points higher"
    return text


def _name(row: Row) -> str:
    return f"{row.rule} on {row.scheme}"
