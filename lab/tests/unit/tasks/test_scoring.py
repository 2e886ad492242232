"""Scorers on cases by hand, and answers that they must reject."""

from __future__ import annotations

import pytest

from foretoken_lab.tasks import scoring
from foretoken_lab.tasks.example import Example


def example(answer, *alternatives):
    return Example(id="1", prompt="?", answer=answer, response=answer, category="all", alternatives=alternatives)


def test_numbers_are_compared_as_numbers():
    assert scoring.score_number("#### 145", example("145.0")) == {"correct": 1.0}
    assert scoring.score_number("#### 146", example("145.0")) == {"correct": 0.0}
    assert scoring.score_number("no idea", example("145.0")) == {"correct": 0.0}
    assert scoring.score_number("no idea", example("no number either")) == {"correct": 0.0}


def test_spans_as_squad_does():
    assert scoring.normalise("The  Cat's, a hat!") == "cats hat"
    assert scoring.token_f1("the black cat", "a cat") == pytest.approx(2 * (1 / 2) * 1 / (1 / 2 + 1))
    assert scoring.token_f1("cat cat", "cat") == pytest.approx(2 / 3)
    assert scoring.token_f1("the", "a") == 1.0
    assert scoring.token_f1("", "cat") == 0.0
    assert scoring.score_span("the Eiffel Tower.", example("Eiffel Tower")) == {"correct": 1.0, "f1": 1.0}
    assert scoring.score_span("tower", example("Big Ben", "Eiffel Tower"))["f1"] == pytest.approx(2 / 3)
    assert scoring.score_span("London", example("Paris", "Rome")) == {"correct": 0.0, "f1": 0.0}


def test_a_key_must_be_the_only_number():
    assert scoring.score_key("12345", example("12345"))["correct"]
    assert scoring.score_key("The secret number is 12345.", example("12345"))["correct"]
    assert not scoring.score_key("12345 or 54321", example("12345"))["correct"]
    assert not scoring.score_key("123456", example("12345"))["correct"]
    assert not scoring.score_key("", example("12345"))["correct"]


@pytest.mark.parametrize(
    ("output", "correct", "parses"),
    [
        ('{"a": 1, "b": [true, "x"]}', 1, 1),
        ('{"b": [true, "x"], "a": 1}', 1, 1),
        ('{"a": true, "b": [true, "x"]}', 0, 1),  # Python says 1 == True
        ('{"a": 1.0, "b": [true, "x"]}', 0, 1),
        ('{"a": "1", "b": [true, "x"]}', 0, 1),
        ('{"a": 1, "b": ["x", true]}', 0, 1),
        ('{"a": 1}', 0, 1),
        ('{"a": 1, "b": [true, "x"]', 0, 0),
        ('Here: {"a": 1, "b": [true, "x"]}', 0, 0),
        ("[" * 100_000, 0, 0),
        ("", 0, 0),
    ],
)
def test_json_is_strict(output, correct, parses):
    assert scoring.score_json(output, example('{"a": 1, "b": [true, "x"]}')) == {"correct": correct, "parses": parses}


def block(code):
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("output", "correct", "parses", "defines"),
    [
        (block("def f(a, b):\n    return a + b"), 1, 1, 1),
        ("Sure!\n" + block("def f(a, b):\n  # sum\n  return (a+b)") + "\nDone.", 1, 1, 1),
        (block("def f(a, b):\n    return b + a"), 0, 1, 1),
        (block("def f(a, b):\n    return a + b\nf(1, 2)"), 0, 1, 1),
        (block("def f(a, c):\n    return a + c"), 0, 1, 0),
        (block("def g(a, b):\n    return a + b"), 0, 1, 0),
        (block("def f(a, b):\nreturn a + b"), 0, 0, 0),
        (block("(" * 5000), 0, 0, 0),
        (block(""), 0, 0, 0),
        (block('"\\d"'), 0, 1, 0),  # an odd escape is a warning, not an error
        ("def f(a, b):\n    return a + b", 0, 0, 0),  # no block
        ("```python\ndef f(a, b):\n    return a + b", 0, 0, 0),  # cut off
    ],
)
def test_code_is_compared_by_its_syntax_tree(output, correct, parses, defines):
    expected = example(block("def f(a, b):\n    return a + b"))
    assert scoring.score_code(output, expected) == {"correct": correct, "parses": parses, "defines": defines}


def test_code_is_never_run(tmp_path):
    trap = tmp_path / "trap"
    scoring.score_code(block(f"open({str(trap)!r}, 'w')"), example(block("def f():\n    return 1")))
    assert not trap.exists()
