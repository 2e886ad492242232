"""``foretoken train judge`` with the lab's tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.judge.network import JudgeHead
from foretoken.models.load import load
from foretoken_lab.judge.train import best_without_head
from helpers.threads import one_thread  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    names = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jane")
    lines = [
        {
            "question": f"What does {names[n % 10]} buy on day {n}?",
            "correct": f"{names[n % 10]} buys kites.",
            "wrong": f"{names[n % 10]} buys 77777 kites.",
            "error": [len(names[n % 10]) + 6, len(names[n % 10]) + 11],
        }
        for n in range(60)
    ]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def train(arguments):
    return main(["train", "judge", *arguments.split()])


@pytest.mark.full_product  # a run on own questions differs in its tasks alone: test_train_judge_on_own_questions.py
def test_a_head_from_tasks_and_annotations(capsys):
    command = (
        "--target zoo:base --draft-model zoo:draft --task json,code --examples 4 --triples mine.jsonl --seed 1 "
        "--threads 1 --labels kept.jsonl --out head --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert record["provenance"]["command"].startswith("foretoken train judge --target zoo:base --draft-model zoo:draft")
    assert record["asked"] == {"json": 2, "code": 2}
    assert record["triples"]["texts"] == 120
    assert set(record["held_out"]["by_source"]) <= {"mine", "json", "code", "random tokens"}
    mine = record["held_out"]["by_source"]["mine"]
    name, area = best_without_head(mine)
    cheap = f"(without a head at most {area:.3f}, {name})"
    assert f"held out, mine: ROC AUC {mine['auc']:.3f} {cheap}; above {record['threshold']:.3f} are" in err
    assert {"p", "q", "entropy", "chance"} < set(mine["auc_of"])
    # all that was asked is in the file: the same labels, and nothing is mined again
    first = Path("kept.jsonl").read_text()
    assert (train(command), Path("kept.jsonl").read_text()) == (0, first)
    assert json.loads(capsys.readouterr().out)["labels"] == record["labels"]
    assert f"held out, mean of the ROC AUC within each: {record['held_out']['macro_auc']:.3f}" in err
    head = JudgeHead.load(Path("head"))
    head.check_target(load("zoo:base", device="cpu"))
    assert head.config.target == "zoo:base"


def test_an_unknown_task_and_the_default_ones(capsys):
    assert train("--target zoo:base --draft-model zoo:draft --task code,jsn --out none") == 2
    assert "--task jsn: did you mean 'json'?" in capsys.readouterr().err
    assert train("--target zoo:base --out none") == 2
    assert "--draft-model is needed for --task" in capsys.readouterr().err
