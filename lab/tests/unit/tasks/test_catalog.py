"""The table of tasks, and refusals before a model is loaded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from foretoken.core.errors import ConfigError
from foretoken_lab.tasks.catalog import TASKS, Setting, find
from foretoken_lab.tasks.example import split_of

FREE = [task for task in TASKS.values() if task.data != "folder"]


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


def test_the_tasks_by_name():
    assert list(TASKS) == [
        "arithmetic", "profiles", "keys", "json", "code", "squad", "factbook", "svamp", "gsm8k", "qmsum",
    ]  # fmt: skip
    assert all(name == task.name for name, task in TASKS.items())


@pytest.mark.parametrize("task", FREE, ids=lambda task: task.name)
def test_tasks_without_a_folder_give_the_requested_number_of_distinct_repeatable_examples(task):
    examples = task.examples(60, Setting())
    assert len({each.prompt for each in examples}) == 60
    assert examples == task.examples(60, Setting())
    assert examples[:20] == task.examples(20, Setting())
    if task.data == "generated":
        assert all(split_of(each.prompt) == "heldout" for each in examples)


@pytest.mark.parametrize("task", FREE, ids=lambda task: task.name)
def test_a_scorer_takes_the_answer_and_rejects_another(task):
    """Negative control for every task with right and wrong."""
    examples = task.examples(30, Setting())
    for one, other in pairwise(examples):
        assert task.score(one.answer, one)["correct"] == 1.0
        assert one.answer == other.answer or task.score(other.answer, one)["correct"] == 0.0
        assert task.score("", one)["correct"] == 0.0


def test_a_generator_with_few_prompts_ends():
    found = find("code").examples(3000, Setting())
    assert 500 < len(found) <= 3000


def test_the_context_sets_the_length():
    short, long = (find("keys").examples(1, Setting(context=length))[0].prompt for length in (400, 4000))
    assert 200 < len(short) <= 400
    assert 3800 < len(long) <= 4000


@pytest.mark.parametrize(
    ("name", "limit", "setting", "message"),
    [
        ("svamp", 5, Setting(), "--data DIR"),
        ("qmsum", 5, Setting(), "--data DIR"),
        ("squad", 201, Setting(), "has 200 examples"),
        ("arithmetic", 5, Setting(context=10), "it is for keys, qmsum"),
        ("arithmetic", 0, Setting(), "--limit 0"),
    ],
)
def test_what_a_task_cannot_do_is_refused(name, limit, setting, message):
    with pytest.raises(ConfigError, match=message):
        find(name).check(limit, setting)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        find("squad").check(5, Setting(data=tmp_path / "nowhere"))


def test_an_unknown_task_offers_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        find("arithmetix")
