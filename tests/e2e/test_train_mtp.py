"""``foretoken train mtp`` from the command line: a checkpoint that brings a layer, and drafts with it; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.mtp import train as mtp
from helpers.head_training import STEP, assert_foretold, enter, fill, small_steps
from helpers.mistakes import assert_one_line
from helpers.mtp_models import save_mtp
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_steps(monkeypatch, mtp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = fill(tmp_path_factory.mktemp("folder"), 2, (("target", 64),))
    save_mtp("glm4_moe", place / "glm")
    save_model("gpt2", place / "gpt2")
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    enter(folder, monkeypatch)


def train(arguments):
    return main(["train", "mtp", *arguments.split()])


@pytest.mark.parametrize("target", ["target", "glm"])
def test_a_layer_is_trained_stored_and_drafts(target, capsys):
    """For a dense model, which is laid out anew, and for a checkpoint that brings a layer, which is trained on."""
    out_folder = f"{target}-mtp"
    command = (
        f"--target {target} --corpus mine.jsonl --tokens {3 * STEP} --steps 2 --seed 1 --suite ask.jsonl "
        f"--threads 1 --out {out_folder} --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path(out_folder, "training.json").read_text())
    assert (record["method"], record["target"], record["steps"]) == ("mtp", target, 3)
    assert {source["name"]: source["share"] for source in record["mixture"]} == {"mine": 0.5, "own_words": 0.5}
    assert_foretold(record)
    assert f"try: foretoken generate PROMPT --model {out_folder} --method mtp" in err
    index = json.loads(Path(out_folder, "model.safetensors.index.json").read_text())["weight_map"]
    assert all(Path(out_folder, name).is_file() for name in set(index.values()))
    generate = f"generate Hi --model {out_folder} --method mtp --max-tokens 8 --threads 1 --dtype float32 --json"
    assert main(generate.split()) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["num_draft_tokens"] > 0
    plain = f"generate Hi --model {target} --method none --max-tokens 8 --threads 1 --dtype float32 --json"
    assert main(plain.split()) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == drafted["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--target target --corpus mine.jsonl --out file", 2, "this is a file"),
        ("--target glm --corpus mine.jsonl --out glm", 2, "this is the target"),
        ("--target target --corpus mine.jsonl --out glm", 2, "another model lies there"),
        ("--target gpt2 --corpus mine.jsonl --out new", 1, "a 'gpt2' cannot be laid out"),
        ("--target target --corpus mine.jsonl --out new --own-words 2", 2, "--own-words 2"),
        ("--target target --corpus mine.jsonl --out new --features store", 2, "--features holds its text already"),
        ("--target nobody --corpus mine.jsonl --out new", 1, "nobody"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert train(f"{arguments} --suite ask.jsonl --tokens 10") == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
