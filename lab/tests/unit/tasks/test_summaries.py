"""Meetings: the window that is shown, and ROUGE with and without its package."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from foretoken.core.errors import ConfigError
from foretoken_lab.tasks import summaries
from foretoken_lab.tasks.example import Example

EXAMPLE = Example(id="1", prompt="?", answer="the cat sat on the mat", response="", category="general")


@pytest.fixture
def folder(tmp_path):
    meeting = {
        "id": "m1",
        "document": "\n".join(f"Speaker: turn {number:03d}" for number in range(200)),
        "queries": [
            {"query": "What was it about?", "answer": "Turns.", "type": "general"},
            {
                "query": "What came later?",
                "answer": "More.",
                "type": "specific",
                "relevant_turns": [["90", "95"], ["50", "60"]],
            },
        ],
    }
    path = tmp_path / "eval" / "qmsum.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps(meeting).encode()))
    return tmp_path


def test_a_window_starts_where_the_question_points_and_fits(folder, monkeypatch):
    monkeypatch.setattr(summaries, "_scorer", lambda: None)
    by_category = {each.category: each for each in summaries.qmsum(folder, 400, len)}
    assert by_category["general"].prompt.startswith("Speaker: turn 000\nSpeaker: turn 001\n")
    assert by_category["specific"].prompt.startswith("Speaker: turn 050\n")
    for each in by_category.values():
        assert 350 < len(each.prompt) <= 400
        assert each.prompt.count("Question: ") == 1


def test_rouge_of_hand_cases():
    pytest.importorskip("rouge_score", reason="rouge-score is an optional extra")
    assert summaries.score_rouge("the cat sat on the mat", EXAMPLE) == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert summaries.score_rouge("dogs", EXAMPLE) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    # 3 of 3 words found of 6; one of two pairs of five; "the cat mat" in order
    found = summaries.score_rouge("the cat mat", EXAMPLE)
    assert found == pytest.approx({"rouge1": 2 * 0.5 / 1.5, "rouge2": 2 * 0.5 * 0.2 / 0.7, "rougeL": 2 * 0.5 / 1.5})


def test_without_the_package_the_extra_is_named_before_anything_runs(folder, monkeypatch):
    summaries._scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ConfigError, match="pip install rouge-score"):
        summaries.qmsum(folder, 400, len)
