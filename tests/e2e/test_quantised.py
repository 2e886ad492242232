"""Quantised models on the command line, as a user gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken import zoo
from foretoken.cli.main import main
from helpers import quantised_folders

PROMPT = "Tom has 12 marbles. He buys 30 more."


def generate(*arguments: str) -> list[str]:
    return ["generate", PROMPT, "--max-tokens", "16", "--json", *arguments]


def test_a_folder_of_gptq(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised_folders.write(Path(zoo.path("draft")), tmp_path / "q", *quantised_folders.gptq(4, 32, ordered=True))
    texts = []
    for method in ("none", "ngram"):
        assert main(generate("--model", str(tmp_path / "q"), "--method", method)) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]


def test_keys_and_values_of_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--kv-cache-dtype", "int8"]
    texts = []
    for method in ("ngram", "none"):
        assert main(generate("--method", method, *keys)) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]
    assert main(generate("--model", "zoo:hybrid", *keys)) == 2
    assert "not model 'zoo:hybrid': it has state-space layers" in capsys.readouterr().err
    assert main(generate("--kv-cache-dtype", "int4")) == 2
    assert "--kv-cache-dtype int4 must be" in capsys.readouterr().err
