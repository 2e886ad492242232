"""A user's questions: numbers and words as answers, and lines that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import ConfigError, InputError
from foretoken_lab.tasks.question_sets import QuestionSet, checked, find_questions


def read(folder: Path, *records: Any) -> QuestionSet:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return find_questions(str(path))


def test_a_file_is_a_set_of_its_name_in_its_order(tmp_path: Path) -> None:
    records = [{"question": f"What is {n} + 1?", "answer": n + 1, "source": "me"} for n in range(5)]
    found = read(tmp_path, *records)
    assert found.name == "mine"
    asked = [each.prompt for each in found.training(3)]
    assert asked == [record["question"] for record in records]
    assert [each.right(f"It is {n + 1}.") for n, each in enumerate(found.training(0))] == [True] * 5
    assert [each.prompt for each in found.held_out(2)] == asked[:2]


@pytest.mark.parametrize("answer", ["42", "42.0", "$42"])
def test_a_number_is_the_final_one(answer: str) -> None:
    question = checked("?", answer)
    for said, right in (("12 + 30 = 42", True), ("42.00", True), ("42, or 43", False), ("forty-two", False)):
        assert question.right(said) == question.still_right(said) == right


def test_an_answer_is_right_or_still_right_within_other_words() -> None:
    question = checked("?", "Ada Lovelace", "Ada")
    for said, right, still in (
        ("the Ada Lovelace.", True, True),
        ("ada", True, True),
        ("It was Ada Lovelace.", False, True),
        ("not in any way Ada at all", False, False),
        ("Lovelace", False, False),
    ):
        assert (question.right(said), question.still_right(said)) == (right, still), said


def test_several_answers_may_be_right(tmp_path: Path) -> None:
    (question,) = read(tmp_path, {"question": "?", "answer": ["seven", 7]}).training(0)
    assert [question.right(said) for said in ("Seven.", "3 + 4 = 7", "8")] == [True, True, False]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"question": "", "answer": 1}, "question"),
        ({"question": 3, "answer": 1}, "question"),
        ({"question": "?", "answer": ""}, "answer"),
        ({"question": "?", "answer": "..."}, "answer"),
        ({"question": "?", "answer": []}, "answer"),
        ({"question": "?", "answer": True}, "answer"),
        ({"question": "?", "answer": {"a": 1}}, "answer"),
        ({"question": "?", "answer": float("nan")}, "answer"),
        ({"question": "?"}, "answer"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, record: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"mine\.jsonl:2: .*{field}"):
        read(tmp_path, {"question": "?", "answer": 1}, record)


def test_a_file_without_questions(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no questions"):
        read(tmp_path)


def test_a_name_that_nothing_declares() -> None:
    with pytest.raises(ConfigError, match=r"--task nonsense: .*FILE\.jsonl"):
        find_questions("nonsense")
