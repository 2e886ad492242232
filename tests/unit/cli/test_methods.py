"""``foretoken methods``: the default guarantee, the methods that fit a given model, and hints of other commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken import catalog
from foretoken.cli.main import main
from foretoken.core.errors import ModelError
from foretoken.models.adoption.fit import misfit
from foretoken.models.load import source_of
from helpers.tiny_models import save_model


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, str]]:
    assert main(["methods", "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_catalogue_names_every_approximate_default() -> None:
    for entry in catalog.entries("drafter"):
        rule = entry.load().declared.own_verifier
        lossy = rule is not None and catalog.find(rule, "verifier").promise == "approximate"
        assert entry.own_rule == (rule if lossy else None)


def test_a_drafter_with_an_approximate_rule_is_not_called_lossless(capsys: pytest.CaptureFixture[str]) -> None:
    promises = {each["name"]: each["promise"] for each in listed(capsys) if each["kind"] == "drafter"}
    for name in ("sprinter", "entropy_adaptive"):
        assert promises[name].startswith("approximate by default")
        assert "lossless with --set verifier=auto" in promises[name]
    assert promises["draft_model"] == "lossless"
    assert main(["methods"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("approximate by default") == 2
    assert "weights: none" not in shown
    assert "needs nothing" not in shown.partition("* needs")[0]


def test_what_a_model_can_use_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_model("llama", tmp_path / "mine"))
    mine = [each for each in listed(capsys, "--model", model) if each["kind"] == "drafter"]
    lacking = [bool(each["lacks"]) for each in mine]
    assert lacking == sorted(lacking)
    lacks = {each["name"]: each["lacks"] for each in mine}
    assert lacks["suffix"] == lacks["ngram"] == ""
    assert "--draft-model" in lacks["draft_model"]
    assert f"foretoken train eagle --target {model}" in lacks["eagle"]
    bundled = {each["name"]: each.get("lacks") for each in listed(capsys, "--model", "zoo:base")}
    assert bundled["draft_model"] == bundled["kangaroo"] == ""
    assert main(["methods", "--model", model]) == 0
    text = capsys.readouterr().out
    assert text.index("as it is (--method NAME)") < text.index("suffix") < text.index("that need more")
    assert main(["methods", "suffix", "--model", model]) == 2
    assert "--model sorts the list" in capsys.readouterr().err


def test_a_folder_with_a_gguf_file_in_it_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=rf"point to the GGUF file in it, {re.escape(str(tmp_path))}/model\.gguf$"):
        source_of(str(tmp_path))
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"model\.gguf, or to one of 1 others"):
        source_of(str(tmp_path))


def test_float16_names_its_remedy() -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    assert misfit(model) == "its dtype is float16: use bfloat16, which is as small, or float32"


@pytest.mark.parametrize("command", ["bench", "analyze acceptance", "calibrate scylla", "eval", "rag"])
def test_a_limit_says_that_it_is_per_category(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert re.search(r"--limit N .*?per (category|task)", shown)
