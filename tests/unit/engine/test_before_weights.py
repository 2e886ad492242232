"""Refusals before weights are read: other vocabularies, missing and foreign parts, prompts, corpora."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.main import main
from foretoken.core.errors import ForetokenError, MismatchError, ModelError
from foretoken.engine.llm import LLM
from foretoken.models.checkpoint_files import CheckpointFiles
from helpers.tiny_models import save_model, save_tokenizer
from helpers.variants import untrained
from helpers.zoo_llms import target


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_weights(monkeypatch)


def forbid_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **options: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(CheckpointFiles, "weights", refuse)


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A small model with another tokenizer."""
    folder = save_model("llama", tmp_path / "other")

    def swap(vocab: dict[str, int]) -> None:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    save_tokenizer(folder, swap)
    return str(folder)


@pytest.mark.parametrize("method", ["draft_model", "suffix_first", "easyspec", "rasd", "entropy_adaptive"])
def test_a_draft_with_other_tokens(method: str, other: str) -> None:
    """Refused where it is not translated, or where the user says so."""
    given = {"vocabulary": "same"} if method in ("draft_model", "easyspec") else {}
    with pytest.raises(MismatchError, match=r"has another vocabulary than 'zoo:base'.*target's tokenizer"):
        LLM("zoo:base", speculative_config={"method": method, "model": other, **given})


@pytest.mark.parametrize("method", ["eagle", "kangaroo", "scylla", "dovetail"])
def test_a_part_that_is_missing(method: str, tmp_path: Path) -> None:
    model = str(save_model("llama", tmp_path / "model"))
    with pytest.raises(ModelError, match=r"make one with 'foretoken train"):
        LLM(model, speculative_config={"method": method})
    for option in ("adapter" if method == "kangaroo" else "head", "model"):
        with pytest.raises(ForetokenError, match="nowhere"):
            LLM(model, speculative_config={"method": method, option: str(tmp_path / "nowhere")})


def test_a_judge_that_is_missing(tmp_path: Path) -> None:
    model = str(save_model("llama", tmp_path / "model"))
    with pytest.raises(ModelError, match="foretoken train judge"):
        LLM(model, speculative_config={"method": "suffix", "verifier": "judge"})


def test_a_part_of_another_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    head = untrained("foretoken.methods.kangaroo.network:Adapter", target(), exit_layer=1)
    forbid_weights(monkeypatch)
    model = str(save_model("llama", tmp_path / "model"))
    with pytest.raises(MismatchError, match="was trained for the target"):
        LLM(model, speculative_config={"method": "kangaroo", "adapter": head})


def test_a_prompt_that_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_model("llama", tmp_path / "model"))  # a context of 128
    assert main(["generate", "word " * 200, "--model", model, "--method", "none"]) == 2
    assert "the prompt has 1000 tokens; the context is 128" in capsys.readouterr().err
    path = tmp_path / "prompts.jsonl"
    said = {"messages": [{"role": "user", "content": "word " * 200}]}
    path.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps(said) + "\n", encoding="utf-8")
    assert main(["generate", "--prompts", str(path), "--model", model, "--method", "none"]) == 2
    assert "prompts.jsonl:2 has" in capsys.readouterr().err.replace(" line ", ":")


def test_a_record_of_a_corpus_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text('{"text": "fine"}\n{"txt": "odd"}\n', encoding="utf-8")
    for command in (["sparse"], ["vocabulary", "--size", "16", "--out", str(tmp_path / "kept")]):
        assert main(["calibrate", *command, "--model", "zoo:base", "--corpus", str(corpus)]) == 2
        assert "chats.jsonl" in capsys.readouterr().err


def test_methods_of_a_benchmark(tmp_path: Path, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["bench", "--model", "zoo:base", "--methods", "ngram,pard", "--draft-model", other]
    assert main(typed) == 1
    assert "has another vocabulary" in capsys.readouterr().err


def test_the_draft_of_a_study(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "acceptance", "--model", "zoo:base", "--draft-model", other]) == 1
    assert "has another vocabulary" in capsys.readouterr().err
    assert main(["analyze", "acceptance", "--model", other]) == 2
    assert "give --draft-model" in capsys.readouterr().err
