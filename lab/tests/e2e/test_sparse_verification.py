"""Sparse verification from the command line: calibrate a model, use it, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folder")
    lines = [{"prompt": f"Tom has {n} marbles. How many?", "response": f"He has {n}."} for n in range(40)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "empty.jsonl").write_text("\n")
    (place / "short.jsonl").write_text('{"prompt": "abcabcabc"}\n{"prompt": "xyxyxyxy"}\n')
    save_model("qwen3_moe", place / "moe", num_experts=8, num_experts_per_tok=4)
    save_model("gpt2", place / "gateless")
    return place


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_calibrated_then_used_by_generate_and_bench(capsys):
    command = "calibrate sparse --model ./moe --corpus mine.jsonl --tokens 600 --block 64 --json"
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    written = json.loads(Path("moe/sparse.json").read_text())
    assert json.loads(out)["moe"] == written["moe"]
    assert written["provenance"]["command"] == f"foretoken {command}"
    assert "moe: 4 experts a row" in err
    assert "reuse: no context was long enough" in err
    assert "wrote moe/sparse.json" in err

    sets = "--set verification.moe=2 --set verification.moe_rule=largest --set verification.ffn=0.05"
    command = f"generate abcabcabcabc --model ./moe --method ngram {sets} --max-tokens 12 --threads 1"
    assert main(f"{command} --json".split()) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["promise"] == "approximate"
    assert answer["distortion"] is None is answer["kl"]
    assert 1 <= answer["experts_per_step"] < 8
    assert "verification: at ffn=0.05 a row leaves out" in err
    assert main(command.split()) == 0
    err = capsys.readouterr().err
    assert "experts per layer and step · distortion not known (sparse verification)" in err

    label = "ngram+verification.moe=3+verification.ffn=0.1"
    command = f"bench --model ./moe --methods ngram,{label} --suite short.jsonl --repeats 1 --max-tokens 8 --threads 1"
    assert main(f"{command} --out bench.json --set ngram.verification.moe_rule=largest".split()) == 2
    assert "verification.moe_rule' does nothing while verification.moe is off" in capsys.readouterr().err
    assert main(f"{command} --out bench.json".split()) == 0
    results = {each["method"]: each for each in json.loads(Path("bench.json").read_text())["results"]}
    assert results["ngram"]["distortion"] == 0
    assert results[label]["distortion"] is None
    assert results[label]["promise"] == "approximate"
    assert results[label]["settings"] == {"verification.moe": 3, "verification.ffn": 0.1}


BAD = [
    ("generate x --model ./moe --set verification.mow=1", 2, "did you mean 'moe'"),
    ("generate x --model ./moe --set verification=moe", 2, "must be a mapping"),
    ("generate x --model ./moe --set verification.moe=4", 2, "use at most 3"),
    (
        "generate x --model ./moe --set verification.moe=1 --set verification.calibration=no.json",
        1,
        "no such calibration",
    ),
    ("generate x --model ./gateless --set verification.ffn=0.1", 2, "has no gated MLP"),
    ("generate x --model zoo:base --set verification.moe=1", 2, "has no routed experts"),
    ("generate x --model zoo:base --set verification.ffn=-1", 2, "ffn=-1 must be"),
    (
        "generate x --model zoo:base --set verification.attention=per_head --set verification.budget=0",
        2,
        "budget=0 must",
    ),
    ("generate x --model zoo:base --set verification.attention=global --set verification.block=50", 2, "power of two"),
    ("generate x --model zoo:base --set verification.ffn=0.1 --logprobs 2 --json", 2, "logprobs=2 with sparse"),
    ("calibrate sparse --model ./moe --corpus no.jsonl", 2, "--corpus no.jsonl: no such file"),
    ("calibrate sparse --model ./moe --corpus moe", 2, "this is a folder"),
    ("calibrate sparse --model ./moe --corpus empty.jsonl", 2, "no text to calibrate on"),
    ("calibrate sparse --model ./moe --corpus mine.jsonl --block 500", 2, "--block 500: must be between 2 and the 128"),
    ("calibrate sparse --model ./moe --corpus mine.jsonl --out no/x.json", 2, "there is no folder no"),
    ("calibrate sparse --model zoo:bse --corpus mine.jsonl", 2, "did you mean 'base'"),
]


@pytest.mark.parametrize(("command", "code", "message"), BAD, ids=[command for command, _, _ in BAD])
def test_mistakes_are_one_line(command, code, message, capsys):
    assert main(command.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1
