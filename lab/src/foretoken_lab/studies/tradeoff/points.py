"""The points of a trade-off: every rule at every value of its knob, and the points to compare them with.

A rule's values go from strict to loose. One knob of a rule varies; its other options may be fixed. A rule may have a
drafter of its own; its knob, and other options, may then be the drafter's. A rule may enter once more with other
options: its label is then ``RULE+OPTION=VALUE``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken import catalog
from foretoken.core.errors import ConfigError, nearest
from foretoken.core.needs import Knob

PLAIN, DRAFT, EXACT = "plain", "draft", "exact"
BUDGET = "max_distortion"
LENGTH = "num_speculative_tokens"
# tokens of a draft at which exact verification is measured, next to the length that it chooses itself: rules with a
# drafter of their own draft 20, and what a longer draft gains is not the rule's merit
EXACT_LENGTHS = (4, 8, 20)


def knobs_of_rules() -> dict[str, Knob]:
    """The lossy rules that declare how they enter a study, in the catalogue's order."""
    declared = {entry.name: entry.load().declared.knob for entry in catalog.entries("verifier")}
    return {name: knob for name, knob in declared.items() if knob is not None}


def default_rules() -> dict[str, dict[str, Any]]:
    """The rules of a study by default: labels, with the options that they contain."""
    rules: dict[str, dict[str, Any]] = {EXACT: {}}
    for name, knob in knobs_of_rules().items():
        rules[name] = {}
        for options in knob.baselines:
            rules["+".join([name, *(f"{key}={value}" for key, value in options.items())])] = dict(options)
    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing that is measured.

    Attributes:
        rule: ``plain``, ``draft`` (the draft model alone), ``exact``, or the label of a lossy verifier.
        knob: the option that varies; "" where nothing does.
        value: of the knob.
        options: the rule's options and its own drafter's, the knob among them; all others have their defaults.
        on_budget: the knob is a budget, all else is held at the loosest value.
        own: ``speculative_config`` of the rule's own drafter; None: the study's drafts for it.
    """

    rule: str
    knob: str = ""
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    on_budget: bool = False
    own: Mapping[str, Any] | None = None

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
        """The ``speculative_config`` of a rule, from that of exact verification where it has no drafter of its own."""
        base = exact if self.own is None else self.own
        return {**base, "verifier": verifier_of(self.rule), **self.options} if self.lossy else {**exact, **self.options}


def make_points(
    rules: Mapping[str, Mapping[str, Any]],
    knobs: Mapping[str, Mapping[str, Sequence[Any]]],
    budgets: Sequence[float],
    *,
    draft: bool,
    lengths: Sequence[int] = (),
    own: Callable[[str, str, Mapping[str, Any]], Mapping[str, Any] | None],
) -> list[Point]:
    """Plain decoding, the draft alone, exact verification, and every rule over its knob and the budgets.

    Args:
        rules: labels of lossy verifiers, with the options that stand in them; ``exact`` may be among them.
        knobs: rule -> option -> values, of all labels of the rule. One option may have several values: it varies.
            Without one the rule's default knob does.
        budgets: values of ``max_distortion``; each is measured with the rule at its last value.
        draft: whether there is a draft model that can stand alone.
        lengths: tokens of a draft at which exact verification is measured as well.
        own: from a rule, the drafter that is its own and what ``knobs`` fixes of its options to that drafter's
            ``speculative_config``; None leaves the rule out.
    Raises:
        ConfigError: an unknown or lossless rule, an unknown option, a value out of range, or two options of
            a rule that vary.
    """
    named = [verifier_of(rule) for rule in rules]
    for rule in knobs:
        if rule not in named:
            raise ConfigError(f"--knob {rule}.…: '{rule}' is not among --rules; {nearest(rule, named)}")
    points = [Point(rule=PLAIN), *([Point(rule=DRAFT)] if draft else []), Point(rule=EXACT)]
    points += [Point(rule=EXACT, knob=LENGTH, value=each, options={LENGTH: each}) for each in lengths]
    declared = knobs_of_rules()
    for rule, own_options in rules.items():
        if rule == EXACT:
            continue
        name = verifier_of(rule)
        given = {**knobs.get(name, {}), **{key: [value] for key, value in own_options.items()}}
        makers = _makers(name)
        _check_options(name, given, makers)
        knob, values = _varying(name, given)
        fixed = {key: each[0] for key, each in given.items() if key != knob}
        drafter = declared[name].drafter if name in declared else None
        config = None if drafter is None else own(name, drafter, fixed)
        if drafter is not None and config is None:
            continue
        of_rule = [
            Point(rule=rule, knob=knob, value=value, options={**fixed, knob: value}, own=config) for value in values
        ]
        loosest = of_rule[-1].options
        of_rule += [
            Point(rule=rule, knob=BUDGET, value=each, options={**loosest, BUDGET: each}, on_budget=True, own=config)
            for each in budgets
        ]
        for point in of_rule:
            _check_values(point, makers)
        points += of_rule
    return points


def verifier_of(rule: str) -> str:
    """The verifier that a label is about."""
    return rule.partition("+")[0]


def _check_options(rule: str, given: Mapping[str, Sequence[Any]], makers: Sequence[Any]) -> None:
    known = [each.name for make in makers for each in dataclasses.fields(make)]
    for key in given:
        if key not in known:
            raise ConfigError(f"--knob {rule}.{key}: rule '{rule}' has no such option; {nearest(key, known)}")
        if key == BUDGET:
            raise ConfigError(f"--knob {rule}.{BUDGET}: use --budget, which holds for every rule")


def _check_values(point: Point, makers: Sequence[Any]) -> None:
    """Let the rule and its drafter refuse values out of range, before anything is loaded."""
    config = {**(point.own or {}), **point.options}
    for make in makers:
        try:
            make(**{each.name: config[each.name] for each in dataclasses.fields(make) if each.name in config})
        except ConfigError as error:
            option = "--budget" if point.on_budget else f"--knob {point.rule}"
            raise ConfigError(f"{option}: {error}") from None


def _varying(rule: str, given: Mapping[str, Sequence[Any]]) -> tuple[str, Sequence[Any]]:
    several = [key for key, values in given.items() if len(values) > 1]
    if len(several) > 1:
        raise ConfigError(f"--knob: rule '{rule}' varies {' and '.join(several)}; give one of them a single value")
    if several:
        return several[0], given[several[0]]
    declared = knobs_of_rules().get(rule)
    if declared is not None:
        return declared.option, given.get(declared.option, declared.values)
    if given:
        key = list(given)[-1]
        return key, given[key]
    raise ConfigError(f"rule '{rule}' has no values to try by default: add --knob {rule}.OPTION=A,B,…")


def _makers(rule: str) -> list[Any]:
    """The Config of the rule, and of its own drafter."""
    verifiers = {entry.name: entry for entry in catalog.entries("verifier")}
    lossy = [name for name, entry in verifiers.items() if entry.promise == "approximate"]
    if rule in verifiers and rule not in lossy:
        raise ConfigError(f"rule '{rule}' is lossless, and has nothing to trade: 'exact' stands for it")
    if rule not in verifiers:
        raise ConfigError(f"unknown rule '{rule}': {nearest(rule, [EXACT, *lossy])}")
    makers = [verifiers[rule].load().Config]
    declared = knobs_of_rules().get(rule)
    drafter = None if declared is None else declared.drafter
    return makers if drafter is None else [*makers, catalog.find(drafter, "drafter").load().Config]
