"""``foretoken train scylla`` from the command line: a head that drafts; mistakes."""

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


def test_a_head_is_trained_and_drafts(capsys):
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
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert main(arguments.split()) == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
