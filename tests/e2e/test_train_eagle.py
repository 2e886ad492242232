"""``foretoken train eagle`` from the command line: a head that then drafts, from text and from features; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.eagle import train as eagle
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.models.fingerprint import fingerprint
from helpers.head_training import STEP, assert_foretold, enter, fill, small_steps
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_steps(monkeypatch, eagle)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("folder"), 2, (("target", 64), ("other", 96)))


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    enter(folder, monkeypatch)


def train(arguments):
    return main(["train", *arguments.split()])


def test_a_head_of_the_targets_own_words_drafts(capsys):
    command = (
        f"eagle --target target --corpus mine.jsonl --tokens {3 * STEP} --draft-vocab-size 60 --steps 2 --seed 1 "
        "--suite ask.jsonl --threads 1 --out head --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert (record["steps"], record["draft_vocab_size"], record["unrolled_steps"]) == (3, 60, 2)
    assert {source["name"]: source["share"] for source in record["mixture"]} == {"mine": 0.5, "own_words": 0.5}
    served, walked = record["acceptance"]["greedy"]["tokens_per_step"], record["walked"]["greedy"]["after"]
    assert_foretold(record)
    assert f"greedy: {served:.2f} tokens per step (training expected {walked:.2f}" in err
    assert Eagle.load(Path("head")).config.target_fingerprint == fingerprint(Path("target"))
    generate = "generate Hi --model target --method eagle --set head=head --max-tokens 4 --threads 1 --dtype float32"
    assert main(generate.split()) == 0
    assert main(generate.replace("--model target", "--model other").split()) == 1
    assert "target_hidden_size is 64, but that of 'other' is 96" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--target target --corpus mine.jsonl --out file", 2, "this is a file"),
        ("--target target --corpus mine.jsonl --out target", 2, "another model lies there"),
        ("--target target --corpus mine.jsonl --out new --algorithm eagle4", 2, "--algorithm eagle4"),
        ("--target target --corpus mine.jsonl --out new --draft-vocab-size 500", 2, "target has 101 tokens"),
        ("--target target --corpus mine.jsonl --out new --mlp-width 40", 2, "--mlp-width 40"),
        ("--target target --corpus mine.jsonl --out new --own-words 2", 2, "--own-words 2"),
        ("--target target --corpus mine.jsonl --out new --features store", 2, "--features holds its text already"),
        ("--target nobody --corpus mine.jsonl --out new", 1, "nobody"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert train(f"eagle {arguments} --suite ask.jsonl --tokens 10") == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
