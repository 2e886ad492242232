"""``foretoken calibrate scylla`` from the command line: a table next to the head; mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.scylla.network import Scylla
from foretoken.models.load import load
from helpers.head_training import enter, fill
from helpers.mistakes import assert_one_line
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.untrained import untrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("folder"), 2, (("target", 64),))


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    enter(folder, monkeypatch)


def test_a_head_is_measured_where_it_lies(capsys):
    untrained(Scylla, load("target", device="cpu"), Path("head").resolve(), layers=2)
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
    shutil.rmtree("target/scylla")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
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
