"""``foretoken train kangaroo`` from the command line: an adapter, from text and from stored features; and mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken import zoo
from foretoken.cli.main import main
from foretoken.methods.kangaroo import train as kangaroo
from foretoken.methods.kangaroo.network import Adapter
from foretoken.models.fingerprint import fingerprint
from foretoken.train import acceptance, mixture, outputs
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

BLOCK, BATCH = 64, 4
STEP = BLOCK * BATCH


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    made = kangaroo.recipe

    def small(*arguments):
        recipe = made(*arguments)
        return replace(recipe, block=BLOCK, schedule=replace(recipe.schedule, batch=BATCH))

    monkeypatch.setattr(kangaroo, "recipe", small)
    monkeypatch.setattr(outputs, "BATCH", 16)
    monkeypatch.setattr(outputs, "LENGTH", 8)
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 500)
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    lines = [
        {"prompt": f"Tom has {n} marbles. He buys {n + 3} more. How many?", "response": f"He has {2 * n + 3}."}
        for n in range(400)
    ]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "empty.jsonl").write_text("\n")
    (place / "file").write_text("")
    save_model("llama", place / "other")
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


def train(arguments):
    return main(["train", *arguments.split()])


def test_an_adapter_of_the_targets_own_words(capsys):
    command = (
        f"kangaroo --target zoo:base --exit-layer 2 --corpus mine.jsonl --tokens {3 * STEP} --out adapter --seed 1 "
        "--threads 1 --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("adapter/training.json").read_text())
    assert (record["steps"], record["seed"], record["exit_layer"], record["replies_only"]) == (3, 1, 2, True)
    assert {source["name"]: source["share"] for source in record["mixture"]} == {"mine": 0.5, "own_words": 0.5}
    assert record["provenance"]["command"].startswith("foretoken train kangaroo --target zoo:base")
    before, after = record["held_out"]["before"], record["held_out"]["after"]
    assert set(after) == {"cross_entropy", "acceptance", "top_1", "top_2", "top_3", "positions"}
    assert f"T=1: {after['acceptance']:.3f} (before: {before['acceptance']:.3f})" in err
    adapter = Adapter.load(Path("adapter"))
    assert adapter.config.target_fingerprint == fingerprint(zoo.path("base"))
    assert record["parameters"] == sum(parameter.numel() for parameter in adapter.parameters())
    generate = "generate Hi --model zoo:base --method kangaroo --set adapter=adapter --max-tokens 4 --threads 1"
    assert main(generate.split()) == 0
    capsys.readouterr()
    assert train(command.replace("--exit-layer 2", "--exit-layer 3")) == 1
    assert "holds a run with another description, exit layer; name another --out" in capsys.readouterr().err


def test_an_adapter_from_stored_features(capsys):
    text = f"--corpus mine.jsonl --out store --depths 1,final --tokens {8 * STEP} --block {BLOCK}"
    assert train(f"features --target other {text}") == 0
    command = f"kangaroo --target other --exit-layer 1 --features store --tokens {2 * STEP} --threads 1 --out stored"
    assert train(command) == 0
    err = capsys.readouterr().err
    assert "expected acceptance at T=1: " in err
    assert "no chat template" in err
    assert Adapter.load(Path("stored")).config.exit_layer == 1

    for arguments, code, message in (
        (command.replace("--exit-layer 1", "--exit-layer 2"), 2, "store: holds the depths 1, final; needed are 2"),
        (command.replace("--target other --exit-layer 1", "--target zoo:base --exit-layer 1"), 1, "another target"),
        (command + " --corpus mine.jsonl", 2, "--features holds its text already"),
    ):
        assert train(arguments.replace("--out stored", "--out none")) == code
        assert_one_line(capsys, message)
        assert not Path("none").exists()


BAD = [
    ("--corpus mine.jsonl --exit-layer 8", 2, "--exit-layer 8: must be from 1 to 7, as the target has 8 layers"),
    ("--corpus mine.jsonl --exit-layer 0", 2, "--exit-layer 0: must be from 1 to 7"),
    ("--corpus mine.jsonl --target zoo:bse", 2, "did you mean 'base'"),
    ("--corpus mine.jsonl --target ./nowhere", 1, "./nowhere"),
    ("--corpus mine.jsonl --own-words 2", 2, "--own-words 2.0: a share must be from 0 to 1"),
    ("--corpus mine.jsonl --tokens 0", 2, "--tokens 0"),
    ("--corpus mine.jsonl --rate 0", 2, "--rate 0.0"),
    ("--corpus mine.jsonl --device gpu", 2, "--device gpu: not available here"),
    ("--corpus mine.jsonl --out file", 2, "--out file: this is a file"),
    ("--corpus none.jsonl", 2, "--corpus none.jsonl: no such file"),
    ("", 2, "--data DIR, or set FORETOKEN_DATA"),
    ("--features nowhere", 2, "nowhere: holds no features"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=[arguments for arguments, _, _ in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, arguments, code, message):
    given = {"--target": "zoo:base", "--exit-layer": "2", "--out": "none"}
    for option, value in given.items():
        if option not in arguments:
            arguments += f" {option} {value}"
    assert train(f"kangaroo {arguments}") == code
    assert_one_line(capsys, message)
    assert not Path("none").exists()


def test_an_empty_corpus(capsys):
    arguments = "--target zoo:base --exit-layer 2 --corpus empty.jsonl --own-words 0 --tokens 64 --out empty"
    assert train(f"kangaroo {arguments}") == 2
    assert_one_line(capsys, "corpus 'empty' is empty")
