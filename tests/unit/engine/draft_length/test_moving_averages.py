"""Running figures that forget, against figures worked out by hand."""

from __future__ import annotations

import pytest

from foretoken.engine.draft_length.moving_averages import LATE, Line, Mean


def line(observations: list[tuple[int, float]], *, keeps: float = 1.0, believed: float = 1.0) -> Line:
    made = Line(keeps, believed)
    for count, seconds in observations:
        made.add(count, seconds)
    return made


def test_a_mean_decays_its_observations_step_by_step() -> None:
    mean = Mean(0.5)
    assert (mean.value, mean.weight) == (0.0, 0.0)
    mean.add(8.0)
    assert (mean.value, mean.weight) == (8.0, 1.0)
    mean.add(2.0, 3.0)
    assert mean.weight == 3.5
    assert mean.value == pytest.approx((0.5 * 8.0 + 3.0 * 2.0) / 3.5)


def test_nothing_seen_is_a_line_of_nothing() -> None:
    empty = line([])
    assert not empty.seen
    assert (empty.at(3), empty.slope, empty.intercept, empty.mean) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("believed", [0.0, 0.5, 1.0])
def test_equal_counts_keep_the_slope(believed: float) -> None:
    """As a share of the seconds per unit: 1 is a line through the origin."""
    found = line([(4, 2.0)] * 3, believed=believed)
    assert found.seen
    assert found.mean == 4.0
    assert found.slope == pytest.approx(believed * 0.5)
    assert found.intercept == pytest.approx(2.0 * (1.0 - believed))
    assert found.at(4) == pytest.approx(2.0)
    assert found.at(6) == pytest.approx(2.0 + believed * 1.0)


def test_counts_that_differ_widely_show_slope_and_intercept_whatever_was_believed() -> None:
    for believed in (0.0, 1.0):
        found = line([(1, 1.1), (40, 5.0)] * 20, believed=believed)
        assert found.slope == pytest.approx(0.1, rel=0.15)
        assert found.intercept == pytest.approx(1.0, abs=0.35)
        assert found.at(found.mean) == pytest.approx(3.05)


def test_a_belief_counts_as_much_as_a_spread_of_28_percent() -> None:
    """Of the mean count: then it weighs as one observation."""
    spread = 0.07 / 0.25 * 4.0
    found = Line(1.0, believed=1.0)
    for count in (4.0 - spread, 4.0 + spread):
        found.add(count, 3.0)  # type: ignore[arg-type]
    assert found.slope == pytest.approx((2 * 0.0 + 0.75) / 3)


def test_neither_slope_nor_intercept_is_ever_negative() -> None:
    falling = line([(1, 4.0), (20, 1.0)] * 5, believed=0.0)
    assert falling.slope == 0.0
    assert falling.intercept == falling.at(9) == pytest.approx(2.5)
    steep = line([(2, 0.1), (20, 5.0)] * 20, believed=1.0)
    assert steep.intercept == 0.0
    assert steep.at(0) == 0.0


def test_the_older_an_observation_the_less_it_counts() -> None:
    found = line([(4, 1.0), (4, 3.0)], keeps=0.5)
    assert found.at(4) == pytest.approx((0.5 * 1.0 + 3.0) / 1.5)
    found = line([(1, 1.0), (3, 2.0)], keeps=0.5)
    assert found.mean == pytest.approx((0.5 * 1 + 3) / 1.5)
    moved = line([(1, 2.0), (40, 2.0)] * 10 + [(1, 1.1), (40, 5.0)] * 60, keeps=0.9)
    assert moved.slope == pytest.approx(0.1, rel=0.15)


def test_a_late_time_is_cut_at_five_times_the_expected_one() -> None:
    assert LATE == 5.0
    found = line([(4, 1.0), (4, 100.0)])
    assert found.at(4) == pytest.approx((1.0 + 5.0) / 2)
    further = line([(4, 1.0), (40, 30.0)])  # expected there: 10
    assert further.slope > 0.7
    below = line([(4, 1.0), (1, 30.0)])  # 0.25 is expected, but no less than the mean is
    assert below.at(below.mean) == pytest.approx((1.0 + 5.0) / 2)


@pytest.mark.parametrize(
    ("seconds", "factor"), [(8.0, 2.0), (0.5, 0.5), (2.0, 1.0), (1000.0, LATE**0.5), (0.0, LATE**-0.5)]
)
def test_a_line_is_moved_half_of_the_way_as_factors_go(seconds: float, factor: float) -> None:
    found = line([(1, 1.1), (40, 5.0)] * 20)
    before = found.slope, found.intercept, found.mean
    found.move(10, seconds * found.at(10) / 2.0)
    assert (found.slope, found.intercept, found.mean) == (
        pytest.approx(before[0] * factor),
        pytest.approx(before[1] * factor),
        before[2],
    )


def test_unobserved_values_do_not_move() -> None:
    found = line([])
    found.move(3, 2.0)
    assert not found.seen
    assert found.at(3) == 0.0
