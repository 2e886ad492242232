"""``foretoken train judge`` from the command line: a head from tasks and annotations; and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.judge.network import JudgeHead
from foretoken.models.load import load
from foretoken_lab.judge.train import best_without_head
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


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
    sums = [(12, 30), (7, 8), (20, 15), (31, 9), (14, 22), (5, 50)]
    asked = [
        {"question": f"Tom has {has} marbles. He buys {buys} more. How many has he now?", "answer": has + buys}
        for has, buys in sums
    ]
    (place / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    (place / "wrong.jsonl").write_text(json.dumps({**lines[0], "error": [3]}) + "\n")
    (place / "file").write_text("")
    save_model("llama", place / "tiny")
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def train(arguments):
    return main(["train", "judge", *arguments.split()])


def test_a_head_from_tasks_and_annotations(capsys):
    command = (
        "--target zoo:base --draft-model zoo:draft --task questions.jsonl --examples 4 --triples mine.jsonl --seed 1 "
        "--threads 1 --labels kept.jsonl --out head --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert record["provenance"]["command"].startswith("foretoken train judge --target zoo:base --draft-model zoo:draft")
    assert record["asked"] == {"questions": 4}
    assert 1 <= record["answered_rightly"]["questions"] <= 4
    assert record["triples"]["texts"] == 120
    assert set(record["held_out"]["by_source"]) <= {"mine", "questions", "random tokens"}
    mine = record["held_out"]["by_source"]["mine"]
    name, area = best_without_head(mine)
    cheap = f"(without a head at most {area:.3f}, {name})"
    assert f"held out, mine: ROC AUC {mine['auc']:.3f} {cheap}; above {record['threshold']:.3f} are" in err
    assert {"p", "q", "entropy", "chance"} < set(mine["auc_of"])
    # the file has all questions: the same labels, and nothing is mined again
    first = Path("kept.jsonl").read_text()
    assert (train(command), Path("kept.jsonl").read_text()) == (0, first)
    assert json.loads(capsys.readouterr().out)["labels"] == record["labels"]
    assert f"held out, mean of the ROC AUC within each: {record['held_out']['macro_auc']:.3f}" in err
    head = JudgeHead.load(Path("head"))
    head.check_target(load("zoo:base", device="cpu"))
    assert head.config.target == "zoo:base"


BAD = [
    ("--target zoo:bse", 2, "did you mean 'base'"),
    ("--draft-model ./nowhere", 1, "./nowhere"),
    ("--draft-model tiny", 1, "has another vocabulary than 'zoo:base'"),
    ("--task none.jsonl", 2, "none.jsonl: no such file"),
    ("--task wrong.jsonl", 2, "wrong.jsonl:1: "),
    ("--examples 0", 2, "--examples 0"),
    ("--minutes 0", 2, "--minutes 0.0"),
    ("--false-accepts 1.5", 2, "--false-accepts 1.5"),
    ("--false-accepts nan", 2, "--false-accepts nan"),
    ("--device gpu", 2, "--device gpu: not available here"),
    ("--out file", 2, "--out file: this is a file"),
    ("--task questions.jsonl --examples 1", 2, "tokens were found that are fine and not the target's own choice; 50"),
    ("--triples none.jsonl", 2, "none.jsonl: no such file"),
    ("--triples wrong.jsonl", 2, "wrong.jsonl:1: 'error' must be [BEGIN, END]"),
    ("--task questions.jsonl --labels wrong.jsonl", 2, "--labels wrong.jsonl: this is no file of mined labels"),
    (
        "--triples mine.jsonl --labels new.jsonl",
        2,
        "--labels new.jsonl: stores mined labels, but nothing is mined: name --task",
    ),
    ("--triples mine.jsonl --tail keep", 2, "--tail keep: must be mask or negative"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=[arguments for arguments, _, _ in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, arguments, code, message):
    given = {"--target": "zoo:base", "--draft-model": "zoo:draft", "--out": "none"}
    for option, value in given.items():
        if option not in arguments:
            arguments += f" {option} {value}"
    if "--task" not in arguments and "--triples" not in arguments:
        arguments += " --task questions.jsonl"
    assert train(arguments) == code
    assert_one_line(capsys, message, progress="asking questions: ")
    assert not Path("none").exists()


def test_no_draft_is_needed_for_annotations_and_one_for_tasks(capsys):
    assert train("--target zoo:base --triples mine.jsonl --out alone") == 0
    assert json.loads(Path("alone/training.json").read_text())["draft"] is None
    assert train("--target zoo:base --task questions.jsonl --out none") == 2
    assert "--draft-model is needed for --task" in capsys.readouterr().err
