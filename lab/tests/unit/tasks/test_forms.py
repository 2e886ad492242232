"""JSON objects and functions: the answers are what the words say, by our own scorers and by a second look."""

from __future__ import annotations

import ast
import json
import re
from itertools import islice, pairwise

import pytest

from foretoken_lab.tasks import forms
from foretoken_lab.tasks.forms import FUNCTIONS, GREETINGS, PARAMETERS
from foretoken_lab.tasks.scoring import score_code, score_json


@pytest.fixture(scope="module")
def objects():
    return list(islice(forms.json_examples("train", 3), 1000))


@pytest.fixture(scope="module")
def functions():
    return list(islice(forms.code_examples("train", 3), 3000))


def test_an_object_holds_the_requested_fields_in_order(objects):
    for each in objects:
        expected = json.loads(each.answer)
        assert each.category == f"{len(expected)}_fields"
        places = [re.search(rf"\b{key}\b", each.prompt).start() for key in expected]
        assert places == sorted(places)
        for value in expected.values():
            said = json.dumps(value) if isinstance(value, bool) else str(value)
            items = value if isinstance(value, list) else [said]
            assert all(item in each.prompt for item in items)


def test_two_to_five_fields_of_every_kind(objects):
    values = [value for each in objects for value in json.loads(each.answer).values()]
    assert {type(value) for value in values} == {str, int, bool, list}
    assert {each.category for each in objects} == {"2_fields", "3_fields", "4_fields", "5_fields"}


def test_a_function_has_the_requested_name_and_parameters(functions):
    for each in functions:
        code = each.answer.removeprefix("```python\n").removesuffix("\n```")
        (function,) = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef)
        parameters = ", ".join(argument.arg for argument in function.args.args)
        assert f"{function.name}({parameters})" in each.prompt
        assert len(function.body) <= 4


def test_a_function_uses_its_parameters_and_what_the_words_name(functions):
    for each in functions:
        (function,) = ast.parse(each.answer.removeprefix("```python\n").removesuffix("```")).body
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert {argument.arg for argument in function.args.args} <= used
        for number in set(re.findall(r"\b\d{2}\b", each.answer)):
            assert number in each.prompt or "last digit" in each.prompt


def test_there_are_sixty_kinds_and_all_come_up(functions):
    assert len(FUNCTIONS) >= 60
    assert len({name for function in FUNCTIONS for name in function.names.split()}) > 150
    named = {re.search(r"def (\w+)", each.answer)[1] for each in functions}
    assert all(named & set(function.names.split()) for function in FUNCTIONS)
    assert {function.parameters for function in FUNCTIONS} == set(PARAMETERS)


def test_our_scorers_accept_every_answer(objects, functions):
    assert all(score_json(each.answer, each)["correct"] for each in objects)
    assert all(score_code(each.response, each)["correct"] for each in functions)


def test_our_scorers_reject_the_answer_of_another(objects, functions):
    """Negative control."""
    for one, other in pairwise(objects):
        assert json.loads(one.answer) == json.loads(other.answer) or not score_json(other.answer, one)["correct"]
    for one, other in pairwise(functions):
        assert one.answer == other.answer or not score_code(other.answer, one)["correct"]


def test_words_need_no_escape():
    assert all(word.isalpha() for word in GREETINGS)
