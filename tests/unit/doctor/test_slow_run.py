"""Causes of slow runs, in the order of the seconds that they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.fields import metrics_fields
from foretoken.core.errors import InputError
from foretoken.core.metrics import Metrics
from foretoken.doctor import slow_run

GOOD = {"draft": 1.0, "verify": 8.5, "other": 0.5}


def row(**changes: Any) -> dict[str, Any]:
    return {
        **metrics_fields(Metrics()),
        "method": "suffix",
        "drafter": "suffix",
        "seconds": 10.0,
        "num_tokens": 300,
        "num_steps": 100,
        "num_draft_tokens": 300,
        "num_accepted_tokens": 200,
        "acceptance_by_position": [0.8, 0.7, 0.6, 0.5],
        "time": GOOD,
        "errors": [],
    } | changes


def causes(path: Path, *rows: dict[str, Any]) -> list[str]:
    path.write_text(json.dumps({"results": rows, "provenance": {"threads": 1}}))
    return [f"{each.check}: {each.found}" for each in slow_run.check(path)]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "run: 1 row without a known cause of slowness"),
        ({"time": {**GOOD, "draft": 5.0}}, "suffix: drafting: takes 50% of the time"),
        ({"time": {**GOOD, "other": 2.0}}, "suffix: other work: takes 20% of the time"),
        ({"num_accepted_tokens": 0}, "suffix: acceptance: 0 of 300 draft tokens were accepted"),
        ({"acceptance_by_position": [0.3]}, "suffix: acceptance: 30% of first draft tokens are accepted"),
        ({"acceptance_by_position": [0.8, 0.5, 0.3, 0.1]}, "suffix: draft length: acceptance falls to half at token 3"),
        ({"num_draft_tokens": 0}, "suffix: drafting: nothing was drafted"),
        (
            {"first_token_seconds": 0.6, "num_prompts": 10, "time": {**GOOD, "other": 6.0}},
            "suffix: prompts: reading them takes 60% of the time",
        ),
        ({"errors": [{"error": "no memory"}]}, "suffix: failures: [{'error': 'no memory'}]"),
    ],
)
def test_each_cause_is_named(changes: dict[str, Any], cause: str, tmp_path: Path) -> None:
    assert causes(tmp_path / "run.json", row(**changes)) == [cause]


def test_the_most_expensive_cause_comes_first_and_rows_are_compared_with_plain_decoding(tmp_path: Path) -> None:
    plain = row(method="none", drafter="none", num_draft_tokens=0, num_steps=300, time={**GOOD, "verify": 3.0})
    slow = row(acceptance_by_position=[0.3], num_accepted_tokens=10, time={**GOOD, "verify": 9.5, "draft": 0.0})
    found = causes(tmp_path / "run.json", plain, slow)
    assert [each.split(":")[1].strip() for each in found] == ["acceptance", "rows"]
    assert found[1].endswith("verifying one more token costs 283% of a step")


def test_answers_of_generate_are_added_up(tmp_path: Path) -> None:
    answer = {**row(num_accepted_tokens=0), "error": None}
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(answer) for _ in range(3)))
    (only,) = slow_run.check(path)
    assert only.found == "0 of 900 draft tokens were accepted"


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", "3", '{"results": [{}]}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match="name what --json of generate or bench wrote"):
        slow_run.check(path)
