"""``foretoken train sprinter`` from the command line: a head for the bundled pair, used at once; and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.sprinter.network import SprinterHead
from helpers.heads import head
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    lines = [
        {"prompt": f"Tom has {n} marbles. He buys {n + 3} more. How many?", "response": f"He has {2 * n + 3}."}
        for n in range(100)
    ]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "empty.jsonl").write_text("\n")
    (place / "prompts.jsonl").write_text('{"prompt": "Tom has 3 marbles."}\n')
    (place / "file").write_text("")
    head("post").save(place / "other")
    save_model("llama", place / "tiny")
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


def train(arguments):
    return main(["train", "sprinter", *arguments.split()])


def test_a_head_from_text_to_generation(capsys):
    command = (
        "--target zoo:base --draft-model zoo:draft --corpus mine.jsonl --suite prompts.jsonl --examples 400 "
        "--draft-length 10 --temperature 1 --soft --replies --seed 1 --threads 1 --out head --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert record["provenance"]["command"].startswith(
        "foretoken train sprinter --target zoo:base --draft-model zoo:draft"
    )
    assert 400 <= record["examples"] < 450
    assert set(record["held_out"]["drawn"]) == {"loss", "auc", "accuracy", "acceptable", "examples"}
    assert set(record["serving"]) == {"T=0", "T=1"}
    assert record["serving"]["T=0"]["kl"] is None
    assert f"ROC AUC {record['held_out']['drawn']['auc']:.3f}" in err
    assert re.search(r"^  mine: drawn [01]\.\d{3}, q [01]\.\d{3}, entropy ", err, re.MULTILINE), err
    assert f"T=1: {record['serving']['T=1']['tokens_per_step']:.2f} tokens per step, distortion" in err
    assert SprinterHead.load(Path("head")).config.target == "zoo:base"

    generate = "generate Hi --model zoo:base --method sprinter --set model=zoo:draft --set head=head --max-tokens 8"
    alone = generate.replace("--set head=head", "--set stop=confidence")
    assert main(alone.split()) == 0
    for options in ("", " --set threshold=0.9", " --set verifier=auto", " --set max_distortion=0.1"):
        assert main((generate + options).split()) == 0
    capsys.readouterr()


BAD = [
    ("--corpus mine.jsonl --target zoo:bse", 2, "did you mean 'base'"),
    ("--corpus mine.jsonl --draft-model ./nowhere", 1, "./nowhere"),
    ("--corpus mine.jsonl --draft-model tiny", 1, "has another vocabulary than 'zoo:base'"),
    ("--corpus mine.jsonl --feature mid", 2, "--feature mid: must be pre, drawn or post"),
    ("--corpus mine.jsonl --examples 0", 2, "--examples 0"),
    ("--corpus mine.jsonl --minutes 0", 2, "--minutes 0.0"),
    ("--corpus mine.jsonl --ratio nan", 2, "--ratio nan"),
    ("--corpus mine.jsonl --temperature -1", 2, "--temperature -1.0"),
    ("--corpus mine.jsonl --device gpu", 2, "--device gpu: not available here"),
    ("--corpus mine.jsonl --out file", 2, "--out file: this is a file"),
    ("--corpus empty.jsonl", 2, "corpus 'empty' is empty: it holds no document to train on"),
    ("--corpus none.jsonl", 2, "--corpus none.jsonl: no such file"),
    ("", 2, "--data DIR, or set FORETOKEN_DATA"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=[arguments for arguments, _, _ in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, arguments, code, message):
    given = {"--target": "zoo:base", "--draft-model": "zoo:draft", "--out": "none"}
    for option, value in given.items():
        if option not in arguments:
            arguments += f" {option} {value}"
    assert train(arguments) == code
    assert_one_line(capsys, message)
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("--method sprinter --set model=zoo:draft --set head=nowhere", 1, "no SPRINTER head for 'zoo:draft'"),
        ("--method sprinter --set model=zoo:draft --set head=other --set threshold=2", 2, "threshold=2"),
        ("--method sprinter --set model=zoo:draft --set stop=confidnce", 2, "did you mean 'confidence'"),
        ("--method sprinter --set model=zoo:draft --set stop=confidence --set head=x", 2, "head='x' does nothing with"),
        ("--method ngram --set verifier=sprinter", 2, "drafts of method 'ngram' carry none"),
    ],
)
def test_mistakes_of_generation(capsys, command, code, message):
    assert main(["generate", "x", "--device", "cpu", *command.split()]) == code
    assert_one_line(capsys, message)


def test_one_name_for_drafter_and_verifier(capsys):
    assert main(["methods", "sprinter"]) == 0
    out = capsys.readouterr().out
    assert out.count("sprinter: ") == 2
    assert "threshold = 0.5" in out
    assert "max_distortion = None" in out
