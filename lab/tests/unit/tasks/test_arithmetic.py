"""Word problems: every equation of a solution holds, and it ends in the answer."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice

import pytest

from foretoken.core.errors import ConfigError
from foretoken_lab.tasks import arithmetic
from foretoken_lab.tasks.arithmetic import ONE_STEP, THREE_STEPS, TWO_STEPS

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
STEPS = {"one_step": 1, "two_steps": 2, "three_steps": 3}


def mistake(example):
    """What is wrong with a solution, recomputed from its text alone; None if nothing is."""
    solution, marker, answer = example.response.partition("\n#### ")
    equations = EQUATION.findall(solution)
    # "brings twice as many" is said within a step
    if len(equations) not in (STEPS[example.category], STEPS[example.category] + ("Twice" in solution)):
        return f"{len(equations)} equations"
    for a, operator, b, result in equations:
        if COMPUTE[operator](int(a), int(b)) != int(result):
            return f"{a} {operator} {b} is not {result}"
    if not marker or answer != example.answer or answer != equations[-1][3]:
        return f"ends in {answer!r}"
    given = {int(number) for number in re.findall(r"\d+", example.prompt)} | {2}  # twice, half
    for a, _, b, result in equations:
        if not {int(a), int(b)} <= given:
            return f"{a} or {b} comes from nowhere"
        given.add(int(result))
    return None


@pytest.fixture(scope="module")
def problems():
    return list(islice(arithmetic.examples("train", 7), 3000))


def test_every_solution_is_right(problems):
    assert [(each.response, mistake(each)) for each in problems if mistake(each)] == []


def test_the_check_itself_finds_mistakes(problems):
    for each in problems[:50]:
        wrong = str(int(each.answer) + 1)
        assert mistake(replace(each, response=each.response.replace(f"#### {each.answer}", f"#### {wrong}")))
        assert mistake(replace(each, response=each.response.replace(f"= {each.answer}.", f"= {wrong}.")))


def test_results_stay_under_a_thousand(problems):
    assert all(2 <= int(result) <= 999 for each in problems for *_, result in EQUATION.findall(each.response))


def test_nothing_is_left_unfilled(problems):
    assert all(not set("{}[]|") & set(each.prompt + each.response) for each in problems)


def test_every_kind_has_many_wordings(problems):
    assert min(map(len, (ONE_STEP, TWO_STEPS, THREE_STEPS))) >= 12
    for category in STEPS:
        assert sum(each.category == category for each in problems) > 800


def test_categories_can_be_chosen():
    chosen = islice(arithmetic.examples("train", 1, ["two_steps"]), 20)
    assert {each.category for each in chosen} == {"two_steps"}
    with pytest.raises(ConfigError, match="four_steps"):
        arithmetic.examples("train", 1, ["four_steps"])


def test_rows_of_sums_are_right_and_within_the_limits():
    kinds = set()
    for asked, worked in islice(arithmetic.sums(3), 300):
        found = EQUATION.findall(worked)
        assert asked == ", ".join(f"{a} {operator} {b}" for a, operator, b, _ in found)
        assert 2 <= len(found) <= 8
        for a, operator, b, result in found:
            assert COMPUTE[operator](int(a), int(b)) == int(result)
            assert all(arithmetic.SMALLEST <= int(number) <= arithmetic.LARGEST for number in (a, b, result))
            kinds.add(operator)
    assert kinds == set("+-*/")
    assert list(islice(arithmetic.sums(3), 20)) == list(islice(arithmetic.sums(3), 20))
    assert list(islice(arithmetic.sums(3), 20)) != list(islice(arithmetic.sums(4), 20))
