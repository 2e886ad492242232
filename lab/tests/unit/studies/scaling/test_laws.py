"""Fits of distributions that are known: recovered, with their units and bases; and what must not be believed is
said.
"""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from foretoken_lab.studies.scaling.laws import BATCH, CAPACITY, DATA, LAWS, contradictions, fit_log

TOKENS = [1e6, 3e6, 1e7, 3e7, 1e8, 1e9]


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_known_scaling_law_is_recovered(law):
    xs = TOKENS if law is DATA else [1, 2, 3, 4, 6]
    found = fit_log(law, xs[::-1], [0.08 * law.log(x) + 5.05 for x in xs[::-1]])
    assert (found.a, found.b) == pytest.approx((0.08, 5.05))
    assert found.r2 == pytest.approx(1)
    assert found.residuals == pytest.approx([0] * len(xs), abs=1e-12)
    assert not found.saturates
    assert found.held_out["error"] == pytest.approx(0, abs=1e-9)
    assert found.held_out["x"] == max(xs)
    assert found.at(xs[1]) == (pytest.approx(0.08 * law.log(xs[1]) + 5.05), "")


def test_by_hand():
    """D = 1, 2, 4, 8 in units of ln 2: x = 0, 1, 2, 3; y = 1, 3, 2, 4: slope 0.8, intercept 1.3."""
    found = fit_log(CAPACITY, [1, 2, 4, 8], [1, 3, 2, 4])
    assert found.a == pytest.approx(0.8 / math.log(2))
    assert found.b == pytest.approx(1.3)
    assert found.residuals == pytest.approx([-0.3, 0.9, -0.9, 0.3])
    assert found.r2 == pytest.approx(1 - 1.8 / 5)
    # without the last: 1, 3, 2 at 0, 1, 2 -> slope 0.5, intercept 1.5, so 3.0 at 3
    assert found.held_out == pytest.approx({"x": 8, "measured": 4, "predicted": 3, "error": 1})
    # 3, 2, 4 at 1, 2, 3 without the first; 1, 2, 4 at 0, 2, 3 without the second; 1, 3, 4 at 0, 1, 3 without the third
    slopes = [0.5, 13.0 / 14, 13.0 / 14, 0.5]
    assert found.without_one["a"] == pytest.approx((min(slopes) / math.log(2), max(slopes) / math.log(2)))


def test_noise_stays_within_the_band():
    noise = random.Random(3)
    ys = [0.3 * DATA.log(x) + 4 + noise.gauss(0, 0.02) for x in TOKENS]
    found = fit_log(DATA, TOKENS, ys)
    assert found.a == pytest.approx(0.3, abs=0.02)
    assert found.without_one["a"][0] < found.a < found.without_one["a"][1]
    assert 0.98 < found.r2 < 1


def test_outside_of_the_measured_range_it_warns():
    found = fit_log(CAPACITY, [1, 2, 3, 4], [1.0, 1.2, 1.3, 1.42])
    assert found.at(3)[1] == ""
    assert found.at(8)[1] == "8 lies outside of the measured range, 1 to 4"


def test_a_scaling_law_that_bends_has_a_knee():
    """Planted: a parabola in ln T with its top at 1e8 tokens."""
    found = fit_log(DATA, TOKENS, [5 - 0.02 * (math.log(x) - math.log(1e8)) ** 2 for x in TOKENS])
    assert found.saturates
    assert found.curvature == pytest.approx(-0.02)
    assert found.knee == pytest.approx(1e8)
    assert "saturates near 1e+08" in found.at(1e10)[1]
    upwards = fit_log(DATA, TOKENS, [5 + 0.02 * (math.log(x) - math.log(1e8)) ** 2 for x in TOKENS])
    assert not upwards.saturates
    assert upwards.knee is None


def test_a_bend_that_is_rounding_is_no_knee():
    """Eight digits of a straight distribution: the knee of their rounding would be no number."""
    fit = fit_log(DATA, [2**18, 2**22, 2**23, 2**25], [4.39027067, 4.61207777, 4.66752955, 4.77843309])
    assert fit.curvature < 0
    assert not fit.saturates
    assert fit.knee is None
    assert fit.at(2**25)[1] == ""


def test_a_stored_fit_can_be_recomputed_and_a_wrong_base_is_seen():
    """Planted: the paper's slip, natural-log coefficients under another base, and other damage."""
    stored = json.loads(json.dumps(fit_log(DATA, TOKENS, [0.3 * DATA.log(x) + 4 for x in TOKENS]).fields()))
    assert contradictions(stored) == []
    assert contradictions({**stored, "base": 10.0}) == ["base=10.0, but this distribution has 2.71828"]
    assert contradictions({**stored, "unit": 1.0}) == ["unit=1.0, but this distribution has 1e+09"]
    (message,) = contradictions({**stored, "a": stored["a"] * math.log(10)})
    said = re.fullmatch(r"a=(\S+), but the points give (\S+)", message)
    assert said
    assert [float(each) for each in said.groups()] == pytest.approx([0.3 * math.log(10), 0.3])
    moved = [*stored["ys"][:-1], stored["ys"][-1] + 0.1]
    assert {each.partition("=")[0] for each in contradictions({**stored, "ys": moved})} > {"a", "b", "r2", "held_out"}
    for name, planted in (
        ("residuals", [0.1, *stored["residuals"][1:]]),
        ("residuals", stored["residuals"][1:]),
        ("without_one", {**stored["without_one"], "a": [0.2, 0.4]}),
        ("held_out", {**stored["held_out"], "predicted": 9.0}),
        ("curvature", 0.5),
        ("saturates", True),
        ("knee", 1e8),
        ("form", "A = a T + b"),
        ("unit_name", "tokens"),
        ("xs", stored["xs"][::-1]),
    ):
        assert any(each.startswith(f"{name}=") for each in contradictions({**stored, name: planted})), name
    assert contradictions({**stored, "law": "else"}) == ["law='else'"]
    # read in base 10, the same coefficients say something else: -> never without the base
    wrong = stored["a"] * math.log10(1e6 / 1e9) + stored["b"]
    assert abs(wrong - stored["ys"][0]) > 1


@pytest.mark.parametrize(
    ("xs", "ys", "message"),
    [
        ([1, 2, 4], [1, 2, 3], "needs 4 different points at least, there are 3"),
        ([1, 2, 2, 4], [1, 2, 2, 3], "there are 3"),
        ([0, 1, 2, 4], [1, 2, 2, 3], "a positive x"),
        ([1, 2, 3, 4], [1, 2, math.nan, 3], "a finite y"),
    ],
)
def test_points_that_give_no_scaling_law(xs, ys, message):
    with pytest.raises(ValueError, match=message):
        fit_log(BATCH, xs, ys)
