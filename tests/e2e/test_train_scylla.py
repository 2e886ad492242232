"""``foretoken train scylla`` and ``calibrate scylla`` from the command line: a head that drafts; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.scylla import train as scylla
from foretoken.methods.scylla.network import Scylla
from foretoken.models.fingerprint import fingerprint
from helpers.head_training import STEP, assert_foretold, enter, fill, small_steps
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_steps(monkeypatch, scylla)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("folder"), 2, (("target", 64),))


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    enter(folder, monkeypatch)


def test_a_head_is_trained_measured_and_drafts(capsys):
    command = (
        f"train scylla --target target --corpus mine.jsonl --tokens {4 * STEP} --draft-vocab-size 60 --steps 2 "
        "--seed 1 --own-words 0 --suite ask.jsonl --threads 1 --out head --json"
    )
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert [each["steps"] for each in record["stages"]] == [3, 1]
    served, walked = record["acceptance"]["greedy"]["tokens_per_step"], record["walked"]["greedy"]["after"]
    assert_foretold(record)
    assert f"greedy: {served:.2f} tokens per step (training expected {walked:.2f}" in err
    assert Scylla.load(Path("head")).config.target_fingerprint == fingerprint(Path("target"))
    calibrate = (
        "calibrate scylla --model target --head head --batch-size 1,2 --nodes 2,4 --suite ask.jsonl --max-tokens 12 "
        "--repeats 1 --threads 1 --json"
    )
    assert main(calibrate.split()) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == json.loads(Path("head/widths.json").read_text())
    assert [batch for batch, _ in found["widths"]] == [1, 2]
    assert "2 requests: " in err
    Path("head").rename("target/scylla")  # where it is found without an option, and where the table goes
    Path("target/scylla/widths.json").unlink()
    assert main(calibrate.replace("--head head ", "").split()) == 0
    widths = [nodes for _, nodes in json.loads(Path("target/scylla/widths.json").read_text())["widths"]]
    assert widths == sorted(widths, reverse=True)
    capsys.readouterr()
    Path("target/scylla").rename("head")
    generate = "generate Hi --model target --method scylla --set head=head --max-tokens 4 --threads 1 --dtype float32"
    assert main(generate.split()) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("train scylla --target target --corpus mine.jsonl --out file", 2, "this is a file"),
        ("train scylla --target target --corpus mine.jsonl --out new --layers 40", 2, "--layers 40"),
        ("train scylla --target target --corpus mine.jsonl --out new --pretrain 2", 2, "--pretrain 2"),
        ("train scylla --target target --corpus mine.jsonl --out new --features store", 2, "holds its text already"),
        ("train scylla --target nobody --corpus mine.jsonl --out new", 1, "nobody"),
        (
            "calibrate scylla --model target",
            2,
            "no Scylla head in target/scylla: make one with 'foretoken train scylla",
        ),
        ("calibrate scylla --model target --head new", 2, "--head new: there is no such folder"),
        ("calibrate scylla --model target --head target --out no/where.json", 2, "there is no folder no"),
        ("calibrate scylla --model target --head target --nodes 0,2", 2, "--nodes 0,2: numbers from 1 to 256"),
        ("calibrate scylla --model target --head target --batch-size x", 2, "--batch-size"),
        ("calibrate scylla --model target --head target", 1, "is not of a Scylla head"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert main(arguments.split()) == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
