"""The trade-off study on stub results: intervals by hand, the front, advice that claims no more than was shown."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from foretoken import catalog
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.metrics import Metrics
from foretoken.drafting import draft_runner as draft_runner
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab.studies.tradeoff import run as tradeoff_run
from foretoken_lab.studies.tradeoff.advice import advice
from foretoken_lab.studies.tradeoff.pareto import pareto_front
from foretoken_lab.studies.tradeoff.points import DRAFT, EXACT, PLAIN, Point, default_rules, knobs_of_rules, make_points
from foretoken_lab.studies.tradeoff.run import Questions, Trial, build_engines, measure
from foretoken_lab.studies.tradeoff.study import measures, tradeoff
from foretoken_lab.studies.tradeoff.table import tables
from foretoken_lab.tasks.evaluate import Answer
from foretoken_lab.tasks.example import Example
from helpers.zoo_llms import base

RULES = knobs_of_rules()

MIXTURE = Point(rule="mixture", knob="lam", value=0.1, options={"lam": 0.1})
STRICT = Point(rule="typical", knob="epsilon", value=0.3, options={"epsilon": 0.3})
POINTS = [Point(rule=PLAIN), Point(rule=DRAFT), Point(rule=EXACT), MIXTURE, STRICT]


def example(name):
    return Example(id=name, prompt=name, answer="", response="", category="")


def answer(name, correct=True, nll=1.0, num_tokens=10, error=None, **scores):
    found = {**({} if correct is None else {"correct": float(correct)}), **scores}
    return Answer(example(name), "", tuple(range(num_tokens)), "stop", {} if error else found, nll, error)


def trials(label, right, *, seconds=(1.0, 1.0), blocks=3, steps=50, nll=None, **scores):
    """All answers of one point, in equal blocks of 100 tokens; ``seconds``: a block's time in every repeat."""
    count = len(right)
    answers = [answer(f"q{i}", right[i], 1.0 if nll is None else nll[i], **scores) for i in range(count)]
    size = -(-count // blocks)
    metrics = Metrics(num_tokens=100, num_steps=steps, distortion_sum=2.0, kl_sum=1.0)
    return [
        Trial(
            label=label,
            task="code",
            repeat=repeat,
            answers=tuple(answers[at : at + size]),
            seconds=time,
            metrics=metrics,
        )
        for repeat, time in enumerate(seconds)
        for at in range(0, count, size)
    ]


def compared(both, own_only, exact_only, neither, seconds=(1.0, 1.0), **scores):
    """Plain, exact and mixture, with so many questions answered rightly by both, one, none."""
    own = [True] * (both + own_only) + [False] * (exact_only + neither)
    exact = [True] * both + [False] * own_only + [True] * exact_only + [False] * neither
    plain = trials(PLAIN, exact, seconds=(2.0, 2.0), **scores)
    return tradeoff(
        POINTS, [*plain, *trials(EXACT, exact, **scores), *trials(MIXTURE.label, own, seconds=seconds, **scores)], 0.0
    )


def test_rules_are_compared_with_exact_verification_at_its_fastest_length():
    """Once a rule that drafts 20 was faster than exact verification of 4, and slower than that of 20."""
    right = [True] * 6
    longer = Point(rule=EXACT, knob="num_speculative_tokens", value=20, options={"num_speculative_tokens": 20})
    study = tradeoff(
        [Point(rule=PLAIN), Point(rule=EXACT), longer, MIXTURE],
        [
            *trials(PLAIN, right, seconds=(2.0, 2.0)),
            *trials(EXACT, right, seconds=(1.0, 1.0)),
            *trials(longer.label, right, seconds=(0.5, 0.5)),
            *trials(MIXTURE.label, right, seconds=(0.8, 0.8)),
        ],
        0.0,
    )
    assert study.exact.point is longer
    mixture = study.row(MIXTURE.label)
    assert mixture.against_exact.middle == pytest.approx(0.625)
    assert mixture.gain_in_speed.mean < 1.0
    assert study.row(EXACT).against_exact.middle == pytest.approx(0.5)
    assert "at its best, with num_speculative_tokens=20," in advice(study)
    assert "No lossy rule is shown to be faster" in advice(study)


# ---------------------------------------------------------------------- the front


def test_the_front_holds_what_nothing_beats_in_both():
    assert pareto_front([(1.0, 5.0), (2.0, 4.0), (1.5, 3.0), (3.0, 1.0), (3.0, 0.5)]) == [0, 1, 3]
    assert pareto_front([(1.0, 1.0), (1.0, 1.0), (0.5, 1.0)]) == [0, 1]  # equals stand together
    assert pareto_front([]) == []


def test_the_draft_alone_is_on_the_front_of_the_clock_only():
    right = [True] * 6
    study = tradeoff(
        POINTS,
        [
            *trials(PLAIN, right, seconds=(2.0,), steps=100),
            *trials(DRAFT, [False] * 6, seconds=(0.1,), steps=100),
            *trials(EXACT, right, seconds=(1.0,)),
            *trials(MIXTURE.label, [False] * 6, seconds=(0.9,), steps=25),
        ],
        0.0,
    )
    names = {name: [study.rows[i].point.label for i in front] for name, front in study.fronts.items()}
    assert names == {
        "tokens_per_second": ["draft", "exact"],
        "tokens_per_step": ["exact", "mixture lam=0.1"],
        "flops_per_token": [],  # nobody counted
    }
    draft = study.row(DRAFT)
    assert (draft.tokens_per_step, draft.target_calls, draft.distortion, draft.kl) == (None, 0.0, None, None)
    assert study.row(MIXTURE.label).target_calls == 25.0


# ---------------------------------------------------------------------- figures


def test_the_difference_is_paired_and_its_interval_that_of_the_paper():
    """Newcombe 1998, 36 both, 12 and 2 one only: 0.2 (0.0569 to 0.3404)."""
    row = compared(36, 12, 2, 0).rows[-1]
    found = row.quality.difference
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    assert (found.first_only, found.second_only) == (12, 2)
    assert row.quality.accuracy == 0.96
    assert row.quality.interval == pytest.approx((0.8654, 0.9890), abs=1e-4)  # Wilson for 48 of 50


def test_only_the_first_repeat_counts_for_quality_and_all_for_speed():
    right = [True, False, True]
    own = trials(MIXTURE.label, right, seconds=(0.5, 0.8))
    own[3:] = [replace(each, answers=(answer(each.answers[0].example.id, correct=False),)) for each in own[3:]]
    study = tradeoff(
        POINTS, [*trials(PLAIN, right, seconds=(2.0, 1.0)), *trials(EXACT, right, seconds=(1.0, 1.0)), *own], 0.0
    )
    row = study.rows[-1]
    assert row.quality.num_questions == 3
    assert row.quality.accuracy == pytest.approx(2 / 3)
    assert (row.tokens_per_second.low, row.tokens_per_second.high) == pytest.approx((125.0, 200.0))
    against = row.against_exact
    assert (against.low, against.middle, against.high) == pytest.approx((1.25, 1.625, 2.0))
    assert (row.against_plain.low, row.against_plain.high) == pytest.approx((1.25, 4.0))
    assert row.gain_in_speed.mean == pytest.approx(2.0 / 1.3)  # of all repeats together
    assert row.tokens_per_step == 2.0
    assert (row.distortion, row.kl) == pytest.approx((0.02, 0.01))


def test_the_interval_of_a_speed_is_that_of_a_ratio_of_sums_over_blocks():
    """Terms log 4/3 -+ 1/3 of two blocks: a half-width of 12.7062 x 0.4714 / sqrt 2."""
    right = [True, True]
    own = trials(MIXTURE.label, right, seconds=(1.0,), blocks=2)
    own[0] = replace(own[0], seconds=0.5)
    rest = [each for name in (PLAIN, EXACT) for each in trials(name, right, seconds=(1.0,), blocks=2)]
    gain = tradeoff(POINTS, [*rest, *own], 0.0).rows[-1].gain_in_speed
    assert gain.mean == pytest.approx(4 / 3)
    low, high = (math.log(end) for end in gain.interval)
    assert (low, high) == pytest.approx((math.log(4 / 3) - 4.2354, math.log(4 / 3) + 4.2354), abs=1e-3)


def test_nll_and_other_measures_are_paired_by_question():
    right = [None] * 3
    study = tradeoff(
        POINTS,
        [
            *trials(PLAIN, right, rougeL=0.4),
            *trials(EXACT, right, nll=[1.0, 2.0, 3.0], rougeL=0.4),
            *trials(MIXTURE.label, right, nll=[2.0, 4.0, 6.0], rougeL=0.5),
        ],
        0.0,
    )
    quality = study.rows[-1].quality
    assert study.measure == "rougeL"
    assert quality.accuracy is quality.difference is None
    assert quality.nll == pytest.approx(0.4)
    # per token 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, Student's 4.303 with two degrees
    assert quality.nll_gain.mean == pytest.approx(0.2)
    assert quality.nll_gain.interval == pytest.approx((0.2 - 0.24841, 0.2 + 0.24841), abs=1e-4)
    assert quality.gains["rougeL"].mean == pytest.approx(0.1)
    assert study.row(EXACT).quality.difference is None


def test_the_difference_in_nll_is_that_of_the_figures_where_lengths_differ():
    own = [answer("q0", nll=2.0, num_tokens=10), answer("q1", nll=9.0, num_tokens=30)]
    other = [answer("q0", nll=2.0, num_tokens=20), answer("q1", nll=3.0, num_tokens=20)]
    first = trials(PLAIN, [True] * 2, seconds=(1.0,), blocks=1)[0]
    study = tradeoff(
        POINTS, [replace(first, label=name, answers=tuple(each)) for name, each in ((PLAIN, own), (EXACT, other))], 0.0
    )
    plain, exact = (study.row(name).quality for name in (PLAIN, EXACT))
    assert (plain.nll, exact.nll) == pytest.approx((0.275, 0.125))
    assert plain.nll_gain.mean == pytest.approx(0.15)
    # terms: 0.275 -+ 0.0375 and 0.125 -+ 0.025, so differences 0.1375 and 0.1625; Student's 12.706 with one degree
    assert plain.nll_gain.interval == pytest.approx((0.15 - 0.0125 * 12.7062, 0.15 + 0.0125 * 12.7062), abs=1e-5)


def test_a_failed_request_is_in_no_pair():
    found = [*trials(PLAIN, [True] * 3), *trials(EXACT, [True] * 3)]
    found[2] = replace(found[2], answers=(answer("q2", error="boom"),))
    row = tradeoff(POINTS, found, 0.0).row(PLAIN)
    assert (row.failed, row.quality.num_questions, row.quality.difference.num_pairs) == (1, 2, 2)


# ---------------------------------------------------------------------- advice


def test_overlapping_intervals_are_not_ranked():
    text = advice(compared(36, 2, 3, 9, seconds=(0.8, 0.9)))
    assert "Exact verification is faster than plain decoding, 2.00 (2.00 to 2.00) times." in text
    assert "mixture lam=0.1 runs at 1.18 (1.11 to 1.25) times the speed of exact verification" in text
    assert "is tied with it in quality: -2.0 points of accuracy" in text
    assert "is not ruled out" in text
    assert "worse" not in text


def test_a_shown_loss_is_reported_with_its_interval():
    text = advice(compared(36, 2, 12, 0, seconds=(0.8, 0.9)))
    assert "Every lossy point that is shown to be faster than exact verification is worse than it: mixture" in text
    assert "-20.0 points of accuracy, 95 % -34.0 to -5.7" in text


@pytest.mark.parametrize("seconds", [(0.8, 1.1), (1.2, 1.3), (1.0, 1.0)])
def test_faster_in_some_repeats_only_is_not_faster(seconds):
    assert "No lossy rule is shown to be faster" in advice(compared(36, 0, 0, 9, seconds=seconds))


def test_faster_in_every_repeat_but_on_few_blocks_only_is_not_faster():
    right = [True] * 6
    found = [*trials(PLAIN, right), *trials(EXACT, right), *trials(MIXTURE.label, right)]
    uneven = [
        replace(each, seconds=0.2 if each.answers[0].example.id == "q0" else 1.05)
        if each.label == MIXTURE.label
        else each
        for each in found
    ]
    study = tradeoff(POINTS, uneven, 0.0)
    assert study.rows[-1].against_exact.low > 1.0
    assert "No lossy rule is shown to be faster" in advice(study)
    assert "but not clearly over the blocks of questions: mixture lam=0.1." in advice(study)


def test_one_repeat_shows_no_speed():
    right = [True] * 6
    study = tradeoff(
        POINTS, [*trials(PLAIN, right, seconds=(1,)), *trials(EXACT, right, seconds=(1,)),
                 *trials(MIXTURE.label, right, seconds=(0.1,))], 0.0
    )  # fmt: skip
    assert "One repeat has no range" in advice(study)


def test_two_rules_with_overlapping_ranges_are_not_ranked_in_speed():
    right = [True] * 30 + [False] * 30
    study = tradeoff(
        POINTS,
        [
            *trials(PLAIN, right, seconds=(2.0, 2.0)),
            *trials(EXACT, right),
            *trials(MIXTURE.label, right, seconds=(0.7, 0.8)),
            *trials(STRICT.label, right, seconds=(0.75, 0.85)),
        ],
        0.0,
    )
    assert "In speed it is tied with typical epsilon=0.3." in advice(study)


def test_a_gain_over_slow_exact_verification_is_shown_with_plain_decoding():
    right = [True] * 30
    study = tradeoff(
        POINTS,
        [
            *trials(PLAIN, right, seconds=(0.5, 0.5)),
            *trials(EXACT, right),
            *trials(MIXTURE.label, right, seconds=(0.8, 0.8)),
        ],
        0.0,
    )
    text = advice(study)
    assert "Exact verification is slower than plain decoding" in text
    assert "(of plain decoding: 0.62 (0.62 to 0.62) times)" in text


def test_tables_fit_100_columns():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables(compared(36, 2, 12, 0, seconds=(0.8, 0.9), rougeL=0.123)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    cut = [line for line in lines if line.rstrip().endswith("…")]
    assert not cut


# ---------------------------------------------------------------------- points


def named(*labels):
    return {label: {} for label in labels}


def with_model(rule, drafter, fixed):
    return {"method": drafter, "model": "zoo:draft", **fixed}


def test_every_rule_over_its_knob_and_the_budgets_with_the_three_references():
    varied = {"mixture": {"lam": [0.2, 0.4]}}
    points = make_points(named(EXACT, "typical", "mixture"), varied, [0.01], draft=True, own=with_model)
    labels = [point.label for point in points]
    assert labels[:3] == ["plain", "draft", "exact"]
    longer = make_points(named(EXACT, "typical"), {}, [], draft=False, lengths=(4, 20), own=with_model)
    assert [point.label for point in longer[1:4]] == [
        "exact",
        "exact num_speculative_tokens=4",
        "exact num_speculative_tokens=20",
    ]
    assert longer[3].config({"method": "draft_model", "model": "m"}) == {
        "method": "draft_model",
        "model": "m",
        "num_speculative_tokens": 20,
    }
    assert labels[3:6] == [f"typical epsilon={value:g}" for value in RULES["typical"].values]
    assert labels[6:8] == ["typical max_distortion=0.01", "mixture lam=0.2"]
    assert labels[8:] == ["mixture lam=0.4", "mixture max_distortion=0.01"]
    assert points[-1].options == {"lam": 0.4, "max_distortion": 0.01}
    assert points[-1].config({"method": "suffix"}) == {
        "method": "suffix", "verifier": "mixture", "lam": 0.4, "max_distortion": 0.01
    }  # fmt: skip
    assert len(set(labels)) == len(labels)


def test_a_single_value_fixes_an_option():
    points = make_points(
        named("topk_relaxed"), {"topk_relaxed": {"relaxed_topk": [3]}}, [], draft=False, own=with_model
    )
    assert [point.rule for point in points[:2]] == [PLAIN, EXACT]
    assert [point.options for point in points[2:]] == [
        {"relaxed_topk": 3, "relaxed_delta": value} for value in RULES["topk_relaxed"].values
    ]


def test_every_lossy_rule_of_the_catalogue_has_its_line_in_the_table():
    """A new one is one line; without it `analyze tradeoff` would pass the rule over."""
    lossy = {entry.name for entry in catalog.entries("verifier") if entry.promise == "approximate"}
    assert set(RULES) == lossy


@pytest.mark.parametrize("rule", RULES)
def test_default_values_are_valid_and_distinct(rule):
    points = make_points(named(rule), {}, [], draft=False, own=with_model)
    assert len({point.label for point in points}) == 2 + len(RULES[rule].values)


def test_a_rule_with_a_drafter_of_its_own_takes_that_ones_options():
    points = make_points(
        named("sprinter", "mixture"),
        {"sprinter": {"threshold": [0.9, 0.7], "max_draft": [6]}},
        [0.05],
        draft=False,
        own=with_model,
    )
    strict, loose, budget, *others = points[2:]
    exact = {"method": "suffix", "num_speculative_tokens": 4}
    assert [strict.label, loose.label] == ["sprinter threshold=0.9", "sprinter threshold=0.7"]
    assert strict.config(exact) == {
        "method": "sprinter", "model": "zoo:draft", "verifier": "sprinter", "threshold": 0.9, "max_draft": 6
    }  # fmt: skip
    assert budget.config(exact) == {**loose.config(exact), "max_distortion": 0.05}
    assert others[0].config(exact) == {**exact, "verifier": "mixture", "lam": RULES["mixture"].values[0]}


def test_a_rule_enters_once_more_with_other_options_as_its_baseline():
    rules = default_rules()
    assert rules["sprinter+stop=confidence"] == {"stop": "confidence"}
    both = {label: rules[label] for label in rules if label.startswith("sprinter")}
    knobs = {"sprinter": {"threshold": [0.9, 0.7]}}
    points = make_points(both, knobs, [], draft=False, own=with_model)[2:]
    assert [point.label for point in points] == [
        "sprinter threshold=0.9",
        "sprinter threshold=0.7",
        "sprinter+stop=confidence threshold=0.9",
        "sprinter+stop=confidence threshold=0.7",
    ]
    assert points[2].config({}) == {**points[0].config({}), "stop": "confidence"}
    assert points[2].config({})["verifier"] == "sprinter"
    assert points[2].lossy
    with pytest.raises(ConfigError, match="stop='confidnce' must be one of"):
        make_points({"sprinter+stop=confidnce": {"stop": "confidnce"}}, {}, [], draft=False, own=with_model)


def test_a_rule_without_an_available_drafter_is_left_out():
    points = make_points(named("sprinter", "mixture"), {}, [], draft=False, own=lambda rule, drafter, fixed: None)
    assert {point.rule for point in points} == {PLAIN, EXACT, "mixture"}


@pytest.mark.parametrize(
    ("rules", "knobs", "budgets", "message"),
    [
        (["typcal"], {}, [], "did you mean 'typical'"),
        (["block"], {}, [], "lossless"),
        (["typical"], {"mixture": {"lam": [0.1]}}, [], "not among --rules"),
        (["typical"], {"typical": {"epsilom": [0.1]}}, [], "did you mean 'epsilon'"),
        (["typical"], {"typical": {"epsilon": [0.1, 2.0]}}, [], "epsilon=2.0 must be a number in"),
        (["typical"], {"typical": {"epsilon": ["much"]}}, [], "epsilon='much'"),
        (["typical"], {"typical": {"epsilon": [0.1, 0.2], "delta": [0.1, 0.2]}}, [], "varies epsilon and delta"),
        (["typical"], {"typical": {"max_distortion": [0.1]}}, [], "use --budget"),
        (["typical"], {}, [-1.0], "--budget: max_distortion=-1.0"),
        (["sprinter"], {"sprinter": {"threshold": [0.5, 2.0]}}, [], "--knob sprinter: threshold=2.0 must be"),
        (["sprinter"], {"sprinter": {"treshhod": [0.5]}}, [], "did you mean 'threshold'"),
        (["mixture"], {"mixture": {"threshold": [0.5]}}, [], "rule 'mixture' has no such option"),
    ],
)
def test_points_that_cannot_be(rules, knobs, budgets, message):
    with pytest.raises(ConfigError, match=message):
        make_points(named(*rules), knobs, budgets, draft=False, own=with_model)


def test_points_of_a_rule_share_one_loaded_draft_model(monkeypatch):
    loads = []
    monkeypatch.setattr(draft_runner, "load", lambda name, **options: loads.append(name) or load(name, **options))
    points = make_points(
        named("sprinter", "mixture"),
        {"sprinter": {"threshold": [0.8, 0.4]}, "mixture": {"lam": [0.1, 0.2]}},
        [0.05],
        draft=False,
        own=with_model,
    )
    engines = build_engines(base(), points, {"method": "draft_model", "model": "zoo:draft"}, None)
    assert loads == ["zoo:draft"] * 3  # exact, sprinter, mixture
    strict, loose, budget = (engines[f"sprinter {each}"].recipe for each in
                             ("threshold=0.8", "threshold=0.4", "max_distortion=0.05"))  # fmt: skip
    assert [each.drafter.config.threshold for each in (strict, loose, budget)] == [0.8, 0.4, 0.4]
    assert strict.drafter.model is loose.drafter.model is budget.drafter.model
    assert strict.drafter.cache is not loose.drafter.cache
    assert {each.verifier.name for each in (strict, loose, budget)} == {"sprinter"}
    assert budget.verifier.config.max_distortion == 0.05
    first, second = (engines[f"mixture lam={lam}"].recipe for lam in (0.1, 0.2))
    assert first.drafter is second.drafter
    assert (first.verifier.config.lam, second.verifier.config.lam) == (0.1, 0.2)


def test_a_rule_without_its_learned_part_is_left_out_unless_it_was_named():
    """A pair of one's own has no head until one is trained."""
    nowhere = {"sprinter": {"head": ["./nowhere"], "threshold": [0.5]}}
    points = make_points(named("sprinter", "mixture"), nowhere, [], draft=False, own=with_model)
    exact = {"method": "draft_model", "model": "zoo:draft"}
    left_out = []
    engines = build_engines(base(), points, exact, lambda point, error: left_out.append((point.label, str(error))))
    assert [label for label, _ in left_out] == ["sprinter threshold=0.5"]
    assert "foretoken train sprinter" in left_out[0][1]
    assert len(engines) == 1 + len(RULES["mixture"].values)
    with pytest.raises(ModelError, match="foretoken train sprinter"):
        build_engines(base(), points, exact, None)


def test_flops_are_those_of_the_first_repeat_over_its_tokens_and_their_front_is_of_few():
    right = [True] * 6
    found = []
    for label, flops in ((PLAIN, 3e7), (EXACT, 4e7), (MIXTURE.label, 2e7)):
        found += [replace(each, flops=100 * flops * (1 + each.repeat)) for each in trials(label, right)]
    study = tradeoff(POINTS, found, 0.0)
    assert [row.flops_per_token for row in study.rows] == pytest.approx([3e7, 4e7, 2e7])
    assert [study.rows[i].point.label for i in study.fronts["flops_per_token"]] == [MIXTURE.label]
    assert study.rows[0].fields()["flops_per_token"] == pytest.approx(3e7)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables(study))
    assert "20M*" in console.export_text()
    one_missing = [replace(found[0], flops=None), *found[1:]]
    assert tradeoff(POINTS, one_missing, 0.0).row(PLAIN).flops_per_token is None


def test_the_picture_has_a_row_for_every_measure_that_is_known():
    right = [True, False, True]
    study = tradeoff(POINTS, [*trials(PLAIN, right, rougeL=0.1), *trials(EXACT, right, rougeL=0.2)], 0.0)
    assert measures(study) == ["accuracy", "rougeL", "nll"]
    without = tradeoff(POINTS, [*trials(PLAIN, [None] * 3), *trials(EXACT, [None] * 3)], 0.0)
    assert measures(without) == ["nll"]


# ---------------------------------------------------------------------- measuring


@pytest.fixture
def asked(monkeypatch):
    """Evaluations in their order; the stub engine is its own label."""
    calls = []

    def evaluate(engine, task, examples, params, *, scorer, progress=None):
        if len(calls) == engine.stop_at:
            raise KeyboardInterrupt
        calls.append((engine.name, [each.id for each in examples], params.seed, params.max_tokens))
        return SimpleNamespace(
            answers=tuple(answer(each.id) for each in examples), seconds=1.0, metrics=Metrics(num_tokens=1), flops=None
        )

    monkeypatch.setattr(tradeoff_run, "evaluate", evaluate)
    return calls


def run(num_questions, repeats, stop_at=None):
    engines = {name: SimpleNamespace(name=name, max_num_seqs=1, stop_at=stop_at) for name in ("a", "b", "c")}
    questions = Questions(
        SimpleNamespace(name="code"),
        [example(f"q{i}") for i in range(num_questions)],
        SamplingParams(seed=7, max_tokens=32),
    )
    return measure(engines, [questions], repeats=repeats, scorer=None)


def test_points_take_turns_on_the_same_blocks_with_the_same_seeds(asked):
    found = run(7, 2)
    warm, measured = asked[:3], asked[3:]
    assert [(name, limit) for name, _, _, limit in warm] == [("a", 16), ("b", 16), ("c", 16)]
    assert "".join(name for name, _, _, _ in measured) == "abcbcabcacab"
    assert measured[0][1:3] == (["q0", "q1", "q2", "q3", "q4"], 7)
    assert measured[3][1:3] == (["q5", "q6"], 12)
    assert measured[6][1:3] == measured[0][1:3]
    assert [trial.repeat for trial in found.trials] == [0] * 6 + [1] * 6
    assert not found.interrupted


@pytest.mark.parametrize(("stop_at", "kept"), [(2, 0), (5, 0), (8, 3), (10, 6), (13, 6)])
def test_an_interruption_keeps_whole_rounds_and_whole_repeats(asked, stop_at, kept):
    found = run(7, 2, stop_at)
    assert (len(found.trials), found.interrupted) == (kept, True)
