"""``foretoken analyze scaling`` from the command line: a tiny sweep to its end, and again; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.scylla import train as scylla
from foretoken_lab.studies.scaling import sweep
from foretoken_lab.studies.scaling.laws import contradictions
from helpers.head_training import shortened
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    made = scylla.training
    monkeypatch.setattr(sweep, "training", lambda options: shortened(made(options)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    lines = [{"prompt": f"Tom has {n} marbles.", "response": f"He has {2 * n + 3}."} for n in range(100)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "ask.jsonl").write_text("".join(json.dumps({"prompt": f"Who has {n}?"}) + "\n" for n in range(2)))
    (place / "file").write_text("")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


TINY = (
    "analyze scaling --model target --corpus mine.jsonl --suite ask.jsonl --tokens 256,512,1024,1536 --layers 1,2 "
    "--batch-size 1,2 --nodes 2 --max-tokens 12 --repeats 1 --draft-vocab-size 60 --threads 1 --out sweep"
)


def test_a_tiny_sweep(capsys):
    assert main(TINY.split()) == 0
    out, err = capsys.readouterr()
    assert "data: A = a ln(T / 1e9) + b" in out
    assert "capacity: not fitted, 2 different points of 2: 4 at least are needed" in out
    assert "speed model: half of the settings are off by at most" in out
    assert "D2-T1536: training" in err
    found = json.loads(Path("sweep/scaling.json").read_text())
    assert len(found["points"]) == 5
    assert contradictions(found["fits"]["data"]) == []
    assert found["fits"]["data"]["base"] == pytest.approx(2.718281828)
    assert found["provenance"]["sweep"]["nodes"] == [2]
    assert main(TINY.split()) == 0  # finished: fitted again from the points
    again = capsys.readouterr()
    assert again.out == out
    assert "training" not in again.err
    assert main(TINY.replace("--layers 1,2", "--layers 1,3").split()) == 1
    assert "holds a sweep with another layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--out file", 2, "this is a file"),
        ("--out file/new", 2, "/file is a file; name a folder to make"),
        ("--out new --tokens 0,5", 2, "--tokens 0,5: whole numbers from 1"),
        ("--out new --layers 1,40", 2, "--layers 1,40: whole numbers from 1 to 32"),
        ("--out new --batch-size 1.5", 2, "--batch-size 1.5"),
        ("--out new --nodes many", 2, "--nodes"),
        ("--out new --picture no/where.png", 2, "there is no folder no"),
        ("--out new --model nobody --corpus mine.jsonl", 1, "nobody"),
        ("--out new --model target --corpus none.jsonl", 2, "none.jsonl"),
        ("--out new --model target --corpus mine.jsonl --suite ask.jsonl --max-tokens 4000", 2, "lower --max-tokens"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert main(f"analyze scaling {arguments}".split()) == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
