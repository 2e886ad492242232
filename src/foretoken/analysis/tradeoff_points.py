"""The points of a trade-off: every rule at every value of its knob, beside what they are compared with.

A rule's values go from strict to loose. One knob of a rule varies; its other options may be fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken import catalog
from foretoken.core.errors import ConfigError, nearest

PLAIN, DRAFT, EXACT = "plain", "draft", "exact"
BUDGET = "max_distortion"

# rule -> knob, values from strict to loose
DEFAULT_KNOBS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "typical": ("epsilon", (0.3, 0.2, 0.1, 0.05, 0.02)),
    "topk_relaxed": ("relaxed_delta", (0.05, 0.1, 0.2, 0.4, 0.8)),
    "mixture": ("lam", (0.05, 0.1, 0.2, 0.3, 0.5)),
    "tolerance": ("tolerance", (0.1, 0.3, 1.0, 3.0, 10.0)),
}
DEFAULT_RULES = (EXACT, *DEFAULT_KNOBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing that is measured.

    Attributes:
        rule: ``plain``, ``draft`` (the draft model alone), ``exact``, or a lossy verifier.
        knob: the option that varies; "" where nothing does.
        value: of the knob.
        options: the rule's options, the knob among them; what is not here has its default.
        on_budget: the knob is a budget, all else is held at the loosest value.
    """

    rule: str
    knob: str = ""
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    on_budget: bool = False

    @property
    def setting(self) -> str:
        """The knob with its value, or nothing."""
        return f"{self.knob}={self.value_text}" if self.knob else ""

    @property
    def value_text(self) -> str:
        """The value as one would type it."""
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)

    @property
    def label(self) -> str:
        """Unique among the points of a study."""
        return f"{self.rule} {self.setting}".strip()

    @property
    def line(self) -> str:
        """Points of one line differ in the value of the knob only."""
        return f"{self.rule}, budget" if self.on_budget else self.rule

    @property
    def lossy(self) -> bool:
        """Whether it is a rule that the study is about, not one of those that it is compared with."""
        return self.rule not in (PLAIN, DRAFT, EXACT)

    def config(self, exact: Mapping[str, Any]) -> dict[str, Any]:
        """The ``speculative_config`` of a rule, from that of exact verification."""
        return {**exact, "verifier": self.rule, **self.options} if self.lossy else dict(exact)


def make_points(
    rules: Sequence[str], knobs: Mapping[str, Mapping[str, Sequence[Any]]], budgets: Sequence[float], *, draft: bool
) -> list[Point]:
    """Plain decoding, the draft alone, exact verification, and every rule over its knob and the budgets.

    Args:
        rules: names of lossy verifiers; ``exact`` may be among them.
        knobs: rule -> option -> values. Of a rule's options one may have several values: it varies. Without one the
            rule's default knob does.
        budgets: values of ``max_distortion``; each is measured with the rule at its last value.
        draft: whether there is a draft model that can stand alone.
    Raises:
        ConfigError: an unknown, lossless or repeated rule, an unknown option, a value out of range, or two options of
            a rule that vary.
    """
    for rule in knobs:
        if rule not in rules:
            raise ConfigError(f"--knob {rule}.…: '{rule}' is not among --rules; {nearest(rule, rules)}")
    points = [Point(rule=PLAIN), *([Point(rule=DRAFT)] if draft else []), Point(rule=EXACT)]
    for number, rule in enumerate(rules):
        if rule in rules[:number]:
            raise ConfigError(f"--rules names '{rule}' twice: keep one")
        if rule != EXACT:
            points += _points_of(rule, knobs.get(rule, {}), budgets)
    return points


def _points_of(rule: str, given: Mapping[str, Sequence[Any]], budgets: Sequence[float]) -> list[Point]:
    make = _options_class(rule)
    known = [each.name for each in dataclasses.fields(make)]
    for key in given:
        if key not in known:
            raise ConfigError(f"--knob {rule}.{key}: rule '{rule}' has no such option; {nearest(key, known)}")
        if key == BUDGET:
            raise ConfigError(f"--knob {rule}.{BUDGET}: use --budget, which holds for every rule")
    knob, values = _varying(rule, given)
    fixed = {key: each[0] for key, each in given.items() if key != knob}
    points = [Point(rule=rule, knob=knob, value=value, options={**fixed, knob: value}) for value in values]
    loosest = points[-1].options
    points += [
        Point(rule=rule, knob=BUDGET, value=each, options={**loosest, BUDGET: each}, on_budget=True) for each in budgets
    ]
    for point in points:
        try:
            make(**point.options)
        except ConfigError as error:
            option = "--budget" if point.on_budget else f"--knob {rule}"
            raise ConfigError(f"{option}: {error}") from None
    return points


def _varying(rule: str, given: Mapping[str, Sequence[Any]]) -> tuple[str, Sequence[Any]]:
    several = [key for key, values in given.items() if len(values) > 1]
    if len(several) > 1:
        raise ConfigError(f"--knob: rule '{rule}' varies {' and '.join(several)}; give one of them a single value")
    if several:
        return several[0], given[several[0]]
    if rule in DEFAULT_KNOBS:
        knob, values = DEFAULT_KNOBS[rule]
        return knob, given.get(knob, values)
    if given:
        key = list(given)[-1]
        return key, given[key]
    raise ConfigError(f"rule '{rule}' has no values to try by default: add --knob {rule}.OPTION=A,B,…")


def _options_class(rule: str) -> Any:
    verifiers = {entry.name: entry for entry in catalog.entries("verifier")}
    lossy = [name for name, entry in verifiers.items() if entry.promise == "approximate"]
    if rule in verifiers and rule not in lossy:
        raise ConfigError(f"rule '{rule}' is lossless, and has nothing to trade: 'exact' stands for it")
    if rule not in verifiers:
        raise ConfigError(f"unknown rule '{rule}': {nearest(rule, [EXACT, *lossy])}")
    return verifiers[rule].load().Config
