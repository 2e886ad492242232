"""GGUF files on the command line, as a user gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")

from foretoken import zoo
from foretoken.cli.main import main
from foretoken_lab.peers.gguf import export
from helpers import gguf_files

PROMPT = "Tom has 12 marbles. He buys 30 more."


def generate(*arguments: str) -> list[str]:
    return ["generate", PROMPT, "--max-tokens", "16", "--json", *arguments]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, place = Path(zoo.path("draft")), tmp_path_factory.mktemp("gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = export(model, AutoTokenizer.from_pretrained(folder), place / "draft.gguf")
    return gguf_files.rewrite(whole, place / "draft-Q8_0.gguf", kind="Q8_0")


def test_a_file_is_a_target_and_a_draft(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted = ["--draft-model", str(file), "--set", "num_speculative_tokens=3"]
    assert main(generate("--model", str(file), *drafted)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_accepted_tokens"] > 0
    assert main(generate("--model", str(file), "--method", "none")) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == found["token_ids"]
    texts = []
    for method in (["--method", "none"], drafted):
        assert main(generate("--model", "zoo:base", "--dtype", "float32", *method)) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]


def test_text_is_read(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text("The old man walked down to the river in the morning and looked at the water. " * 3)
    nats = []
    for model in (str(file), "zoo:draft"):
        assert main(["eval", "--model", model, "--text", str(tmp_path / "x.txt"), "--json"]) == 0
        nats.append(json.loads(capsys.readouterr().out)["nats"])
    assert nats[0] != nats[1]
    assert abs(nats[0] - nats[1]) < 0.05


def test_what_cannot_be_read_is_one_line(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:-1000])
    assert main(generate("--model", str(short))) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "is cut short: its tensor" in err
    assert len([line for line in err.splitlines() if not line.startswith(("loading", "checking", "packing"))]) == 1
    other = gguf_files.rewrite(file, tmp_path / "tq2.gguf", kind=lambda name: "TQ2_0" if "ffn_down" in name else None)
    assert main(generate("--model", str(other))) == 1
    assert "'blk.0.ffn_down.weight' is of kind TQ2_0, which is not read: Q4_0," in capsys.readouterr().err
    assert main(generate("--model", str(tmp_path / "nowhere.gguf"))) == 2
    assert "there is no such folder or file" in capsys.readouterr().err
