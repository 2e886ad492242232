"""What the parts of a step cost, from times that were made up."""

from __future__ import annotations

import pytest

from foretoken.engine.draft_length.step_costs import Reading, StepCosts


def costs(seconds: float = 8.0, fewest: int = 4, steps: int = 3) -> StepCosts:
    made = StepCosts(fewest)
    for _ in range(steps):
        made.measure(fewest, seconds)
    return made


def test_costs_are_known_after_three_steps() -> None:
    assert [costs(steps=steps).known for steps in range(5)] == [False, False, False, True, True]


def test_a_token_is_a_request_s_share_of_a_plain_step() -> None:
    assert costs().token(4) == pytest.approx(1 / 4)
    assert costs().base == pytest.approx(8.0)
    # until other numbers were seen, a further request costs what the others cost
    assert costs().token(6) == pytest.approx(1.5 / 6)
    assert not costs().row_known


@pytest.mark.parametrize("row", [0.0, 0.1, 0.25, -0.02])
@pytest.mark.parametrize("nodes", [2, 12])
def test_a_row_s_cost_is_the_ratio_of_neighbouring_steps(row: float, nodes: int) -> None:
    """Whether the machine is slow for a while or not."""
    for slow in (1.0, 2.0):
        made = costs(8.0, 4)
        for step in range(200):
            times = 1.0 if step < 100 else slow
            drafts = nodes * (step % 3 > 0)
            made.measure(4 + drafts, 8.0 * times * (1.0 + drafts * row))
        assert made.row == pytest.approx(row, abs=0.03)
        assert made.row_known
        assert made.base == pytest.approx(8.0 * slow, rel=0.15)


def test_steps_of_as_many_rows_as_before_teach_nothing() -> None:
    made = costs(8.0, 4)
    for _ in range(50):
        made.measure(4, 16.0)
    assert made.row == pytest.approx(1 / 4)
    assert not made.row_known


def test_a_row_is_known_from_squares_that_come_to_eight() -> None:
    made = costs()
    made.measure(6, 8.0)
    assert not made.row_known
    made.measure(4 + 4, 8.0)
    assert made.row_known


def test_a_late_step_is_cut_at_five_times_the_expected_time() -> None:
    made, cut = costs(7.0, 1), costs(7.0, 1)
    made.measure(3, 10_000.0)
    cut.measure(3, 5 * 3 * 7.0)
    assert made.row == pytest.approx(cut.row)


def test_reading_costs_what_arithmetic_says_until_it_was_timed() -> None:
    reading = Reading(0.25)
    assert reading.token(8.0) == 2.0
    reading.measure(10, 5.0)
    assert reading.token(8.0) == pytest.approx(0.5)
    reading.measure(30, 45.0)
    assert reading.token(8.0) == pytest.approx((0.98 * 10 * 0.5 + 30 * 1.5) / (0.98 * 10 + 30))
    never = Reading(0.25)
    never.measure(10, -3.0)
    assert never.token(8.0) == 0.0
