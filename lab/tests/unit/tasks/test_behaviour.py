"""Functions by their results: other code with the same results, code that does not, and code that must not run."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path

import pytest

from foretoken.core.errors import ForetokenError
from foretoken_lab.tasks import behaviour, calls, forms
from foretoken_lab.tasks.behaviour import behaves
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.forms import FUNCTIONS, PARAMETERS

ADD = Example(
    id="add", prompt="", answer="```python\ndef add(a, b):\n    return a + b\n```", response="", category="",
    calls=((1, 2), (2, 5), ("x", 1)),
)  # fmt: skip


def said(*lines: str, signature: str = "add(a, b)") -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"Here:\n```python\ndef {signature}:\n{body}\n```\nThat is all."


SAME = [
    ("return b + a",),
    ("'''Adds.'''", "c = a", "c += b", "return c"),
    ("return sum([a, b])",),
    ("if a == a:", "    return int(f'{a + b}')"),
]
OTHER = [("return a - b",), ("return a + b + 0.0",), ("return 3",), ("print(a + b)",), ("return str(a + b)",)]
FORBIDDEN = [
    ("import os", "return a + b"),
    ("return (lambda: a + b).__call__()",),
    ("return a + b + 0 * len(str(__builtins__))",),
    ("return int('{0}'.format(a + b))",),
    ("g = (x for x in [a + b])", "return g.gi_frame and a + b"),
    ("global add", "return a + b"),
]


@pytest.mark.parametrize("lines", SAME)
def test_code_that_does_the_same_is_as_good(lines: tuple[str, ...]) -> None:
    assert behaves(said(*lines), ADD)


@pytest.mark.parametrize("lines", OTHER)
def test_code_that_does_something_else_is_not(lines: tuple[str, ...]) -> None:
    assert not behaves(said(*lines), ADD)


def test_what_could_reach_further_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(source: str, name: str, calls: str) -> list[list[str]]:
        assert source == "def add(a, b):\n    return a + b"  # nothing but the expected one
        return [["int", "3"]]

    monkeypatch.setattr(behaviour, "_outcomes", run)
    for lines in FORBIDDEN:
        assert not behaves(said(*lines), ADD)
    for text in (said("return a + b", signature="plus(a, b)"), "```python\nx = 3\n```", "no code", said("return (")):
        assert not behaves(text, ADD)
    assert not behaves(said("return a + b").replace("def", "@max\ndef"), ADD)


def test_parameters_have_the_requested_names() -> None:
    assert not behaves(said("return x + b", signature="add(x, b)"), ADD)
    assert behaves(said("return a + b + c", signature="add(a: int, b, c=0)"), ADD)


def test_a_function_that_does_not_end_or_takes_all_memory_is_stopped() -> None:
    assert not behaves(said("while True:", "    a = a"), ADD)
    assert not behaves(said("return [a] * 10 ** 10"), ADD)
    assert not behaves(said("return add(a, b)"), ADD)


def test_a_system_that_cannot_run_them_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(behaviour, "_CALLS", tmp_path / "calls.py")
    with pytest.raises(ForetokenError, match="the function of 'other' could not be run"):
        behaves(said("return b + a"), replace(ADD, id="other", answer=ADD.answer.replace("a + b", "a+b+0")))


def test_sets_are_ordered_and_types_differ() -> None:
    assert calls.told({3, 1, 2}) == calls.told({2, 1, 3}) != calls.told([1, 2, 3])
    assert calls.told([1]) != calls.told([1.0]) != calls.told([True])
    assert calls.told({"a": 1, "b": [2]}) == calls.told({"b": [2], "a": 1})


def test_the_calls_of_the_task_distinguish_its_functions() -> None:
    """Every two functions of the table that take the same arguments and are not the same differ in some call."""
    seen: dict[str, dict[str, list[object]]] = defaultdict(dict)
    words = {"n": "7", "w": "Hello", "l": "a", "k": "e"}
    for function in FUNCTIONS:
        names = PARAMETERS[function.parameters][0]
        body = function.body.format_map({**words, **dict(zip("pqr", names, strict=False))})
        source = f"def f({', '.join(names)}):\n" + "\n".join(f"    {line}" for line in body.split("\n"))
        every = forms._calls(function.parameters, words)
        orders = json.dumps([dict(zip(names, call, strict=True)) for call in every])
        found = calls.outcomes(source, "f", orders)
        assert sum(each is not None for each in found) >= 2, source
        seen[function.parameters][source] = found
    for group in seen.values():
        for (one, of_one), (two, of_two) in combinations(group.items(), 2):
            assert of_one != of_two, (one, two)


def test_every_answer_of_the_task_behaves_as_itself() -> None:
    for each in islice(forms.code_examples("train", 3), 4):
        assert behaves(each.answer.replace("):\n", "):\n    'Does it.'\n"), each)
