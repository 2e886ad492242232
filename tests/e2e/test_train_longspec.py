"""``foretoken train longspec`` from the command line: a head that then drafts, found without an option; mistakes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.longspec import train as training
from foretoken.methods.longspec.network import LongSpec
from foretoken.models.fingerprint import fingerprint
from foretoken.train import mixture, outputs
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    small = [replace(stage, block=32, batch=2) for stage in training.STAGES]
    monkeypatch.setattr(training, "STAGES", tuple(small))
    monkeypatch.setattr(outputs, "BATCH", 16)
    monkeypatch.setattr(outputs, "LENGTH", 8)
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    lines = [{"prompt": f"Tom has {n} marbles.", "response": f"He has {2 * n + 3}."} for n in range(200)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "ask.jsonl").write_text("".join(json.dumps({"prompt": f"Who has {n}?"}) + "\n" for n in range(2)))
    (place / "file").write_text("")
    for name, family in (("target", "llama_rope_yarn"), ("other", "llama"), ("window", "mistral")):
        save_model(family, place / name, intermediate_size=128)
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


def train(arguments):
    return main(["train", *arguments.split()])


def test_a_head_of_the_targets_own_words_drafts(capsys):
    command = (
        "longspec --target target --corpus mine.jsonl --tokens 256 --levels 3 --mlp-width 64 --seed 1 "
        "--suite ask.jsonl --threads 1 --out head --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert (record["levels"], record["mlp_width"], record["steps"]) == (3, 64, 5)
    shares = [{source["name"]: source["share"] for source in stage["mixture"]} for stage in record["stages"]]
    assert shares == [{"mine": 0.5, "own_words": 0.5}] * 2
    assert f"greedy: {record['acceptance']['greedy']['tokens_per_step']:.2f} tokens per step" in err
    assert LongSpec.load(Path("head")).config.target_fingerprint == fingerprint(Path("target"))
    generate = "generate Hi --model target --method longspec --set head=head --max-tokens 4 --threads 1 --dtype float32"
    assert main(generate.split()) == 0
    assert main(generate.replace("--model target", "--model other").split()) == 1
    assert "not for 'other' as it is now: train one with 'foretoken train longspec" in capsys.readouterr().err
    shutil.copytree("head", "target/longspec")
    assert main(generate.replace("--set head=head ", "").split()) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--target target --corpus mine.jsonl --out file", 2, "this is a file"),
        ("--target target --corpus mine.jsonl --out target", 2, "another model lies there"),
        ("--target target --corpus mine.jsonl --out new --mlp-width 40", 2, "--mlp-width 40"),
        ("--target target --corpus mine.jsonl --out new --own-words 2", 2, "--own-words 2"),
        ("--target window --corpus mine.jsonl --out new", 1, "has no layer of full attention"),
        ("--target nobody --corpus mine.jsonl --out new", 1, "nobody"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert train(f"longspec {arguments} --suite ask.jsonl --tokens 10") == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
