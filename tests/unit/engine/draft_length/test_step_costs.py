"""What the parts of a step take: prices of tokens, rows and readings, from times that were made up."""

from __future__ import annotations

import pytest

from foretoken.engine.draft_length.step_costs import Reading, StepCosts


def costs(plain: float = 8.0, num_requests: int = 4, steps: int = 3) -> StepCosts:
    made = StepCosts()
    for _ in range(steps):
        made.measure(num_requests, 0, plain)
    return made


def test_costs_are_known_after_three_steps_without_drafts() -> None:
    assert [costs(steps=steps).known for steps in range(5)] == [False, False, False, True, True]
    drafted = costs(steps=2)
    drafted.measure(4, 3, 9.0)
    assert not drafted.known


def test_a_token_is_a_request_s_share_of_a_plain_step() -> None:
    assert costs(8.0, 4).token(4) == pytest.approx(2.0)
    assert costs(8.0, 1).token(1) == pytest.approx(8.0)
    # half of a step's time is believed to be of the requests, until other numbers of them were seen
    assert costs(8.0, 4).token(2) == pytest.approx(3.0)


def test_a_price_follows_the_last_steps() -> None:
    made = costs(8.0, 4)
    assert made.token(4) == pytest.approx(2.0)
    for _ in range(400):
        made.measure(4, 0, 16.0)
    assert made.token(4) == pytest.approx(4.0, rel=0.01)


def test_a_row_is_believed_to_cost_what_the_others_cost() -> None:
    assert costs(8.0, 4).row(4) == pytest.approx(2.0)
    assert costs(8.0, 1).row(1) == pytest.approx(8.0)
    assert not costs().row_known


@pytest.mark.parametrize("row", [0.0, 0.1, 1.5, -0.05])
@pytest.mark.parametrize("nodes", [1, 3, 12])
def test_a_row_s_cost_is_found_out(row: float, nodes: int) -> None:
    made = costs(8.0, 4)
    for _ in range(60):
        made.measure(4, nodes, 8.0 + nodes * row)
    assert made.row(4) == pytest.approx(row, abs=0.25 / nodes)
    assert made.row_known


def test_a_belief_counts_as_much_as_its_own_share_of_a_seventh() -> None:
    """One request: the weight of the belief is (1/7)^2, that of an observation its nodes squared."""
    made = costs(7.0, 1)
    made.measure(1, 1, 7.0)
    assert made.row(1) == pytest.approx(7.0 * (1 / 49) / (1 + 1 / 49))
    several = costs(8.0, 4)
    several.measure(4, 2, 8.0)
    weight = (4 / 7) ** 2
    assert several.row(4) == pytest.approx(8.0 * weight * 0.25 / (4 + weight))


def test_a_row_is_known_from_squares_that_come_to_eight() -> None:
    for nodes, steps in ((1, 9), (2, 3), (3, 1)):  # older steps count a little less
        made = costs()
        for _ in range(steps):
            assert not made.row_known
            made.measure(4, nodes, 8.0)
        assert made.row_known


def test_rows_are_forgotten() -> None:
    made = costs(8.0, 4)
    for _ in range(300):
        made.measure(4, 4, 8.0 + 4 * 1.0)
    for _ in range(300):
        made.measure(4, 4, 8.0 + 4 * 0.2)
    assert made.row(4) == pytest.approx(0.2, abs=0.02)


def test_a_late_step_s_rows_are_cut_at_five_times_the_expected_cost() -> None:
    made, cut = costs(7.0, 1), costs(7.0, 1)
    made.measure(1, 2, 10_000.0)
    cut.measure(1, 2, 7.0 + 5 * 2 * 7.0)
    assert made.row(1) == pytest.approx(cut.row(1))
    assert made.row(1) > 4 * 7.0


def test_where_rows_are_cheap_a_late_step_is_cut_at_five_plain_tokens_a_row() -> None:
    made, cut = costs(7.0, 1), costs(7.0, 1)
    for each, late in ((made, 10_000.0), (cut, 7.0 + 5 * 2 * 7.0)):
        for _ in range(20):
            each.measure(1, 2, 7.0)
        each.measure(1, 2, late)
    assert made.row(1) == pytest.approx(cut.row(1))


def test_a_step_with_drafts_says_nothing_before_there_was_one_without() -> None:
    made = StepCosts()
    made.measure(1, 4, 10.0)
    assert not made.row_known
    made.measure(1, 0, 7.0)
    assert made.row(1) == pytest.approx(7.0)


def test_the_line_of_drafting_is_believed_to_begin_at_nothing() -> None:
    made = StepCosts()
    made.drafting.add(4, 2.0)
    assert made.drafting.intercept == 0.0
    assert made.drafting.slope == pytest.approx(0.5)


def test_reading_costs_what_arithmetic_says_until_it_was_timed() -> None:
    reading = Reading(0.25)
    assert reading.token(8.0) == 2.0
    assert reading.token(4.0) == 1.0
    reading.measure(10, 5.0)
    assert reading.token(8.0) == pytest.approx(0.5)
    reading.measure(30, 45.0)
    assert reading.token(8.0) == pytest.approx((0.98 * 10 * 0.5 + 30 * 1.5) / (0.98 * 10 + 30))


def test_a_reading_never_costs_less_than_nothing() -> None:
    reading = Reading(0.25)
    reading.measure(10, -3.0)
    assert reading.token(8.0) == 0.0
