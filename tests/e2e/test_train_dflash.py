"""``foretoken train dflash`` from the command line: a network that then drafts as training foretold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.methods.dflash import train as dflash
from helpers.head_training import STEP, assert_foretold, enter, fill, small_steps
from helpers.threads import one_thread  # noqa: F401  (a fixture)


@pytest.mark.parametrize("shape", ["", "--markov-rank 8 --own-head"], ids=["DFlash", "DSpark"])
def test_a_network_drafts_as_training_foretold(shape, tmp_path, monkeypatch, capsys):
    small_steps(monkeypatch, dflash)
    enter(fill(tmp_path, 2, (("target", 64),)), monkeypatch)
    command = (
        f"train dflash --target target --corpus mine.jsonl --tokens {3 * STEP} --draft-vocab-size 60 --slots 3 "
        f"--seed 1 --suite ask.jsonl --threads 1 --out head --json {shape}"
    )
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert (record["steps"], record["slots"], record["depths"]) == (3, 3, [1, 2])
    assert_foretold(record)
    assert f"{'DSpark' if shape else 'DFlash'} network of" in err
    generate = "generate Hi --model target --draft-model head --max-tokens 4 --threads 1 --dtype float32"
    assert main(generate.split()) == 0
    assert json.loads(Path("head/config.json").read_text())["num_target_layers"] == 3
