"""``foretoken train dovetail`` from the command line: a head that drafts in other places and counts bytes; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.dovetail import train as dovetail
from foretoken.methods.dovetail.network import Dovetail
from foretoken.models.fingerprint import fingerprint
from helpers.head_training import STEP, shortened
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    made = dovetail.training
    monkeypatch.setattr(dovetail, "training", lambda options: shortened(made(options)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    lines = [{"prompt": f"Tom has {n} marbles.", "response": f"He has {2 * n + 3}."} for n in range(200)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "ask.jsonl").write_text("".join(json.dumps({"prompt": f"Who has {n}?"}) + "\n" for n in range(2)))
    (place / "file").write_text("")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


@pytest.mark.parametrize("fusion", ["gate", "concat"])
def test_a_head_is_trained_and_drafts(fusion, capsys):
    command = (
        f"train dovetail --target target --corpus mine.jsonl --tokens {6 * STEP} --draft-vocab-size 60 --steps 2 "
        f"--fusion {fusion} --blocks 2 --seed 1 --own-words 0 --suite ask.jsonl --threads 1 --out {fusion} --json"
    )
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path(fusion, "training.json").read_text())
    assert (record["blocks"], record["fusion"], record["steps"]) == (2, fusion, 6)
    losses = [loss for _, _, loss in record["curve"]]
    assert losses[-1] < losses[0]
    served, walked = record["acceptance"]["greedy"]["tokens_per_step"], record["walked"]["greedy"]["after"]
    assert served == pytest.approx(walked, abs=0.05)
    assert f"greedy: {served:.2f} tokens per step (training expected {walked:.2f}" in err
    assert Dovetail.load(Path(fusion)).config.target_fingerprint == fingerprint(Path("target"))
    generate = (
        f"generate Hi --model target --method dovetail --set head={fusion} --max-tokens 12 --threads 1 "
        "--dtype float32 --set budget=fixed --set dtype=bfloat16 --set device=cuda --json"
    )
    assert main(generate.split()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_moved_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("train dovetail --target target --corpus mine.jsonl --out file", 2, "this is a file"),
        ("train dovetail --target target --corpus mine.jsonl --out new --blocks 40", 2, "--blocks 40"),
        ("train dovetail --target target --corpus mine.jsonl --out new --fusion sum", 2, "--fusion sum"),
        ("train dovetail --target target --corpus mine.jsonl --out new --mlp-width 50", 2, "a multiple of 32"),
        ("train dovetail --target target --corpus mine.jsonl --out new --features store", 2, "holds its text already"),
        ("generate Hi --model target --method dovetail", 1, "foretoken train dovetail --target"),
        ("generate Hi --model target --method dovetail --set place=moon", 2, "place='moon'"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert main(arguments.split()) == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
