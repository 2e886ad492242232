"""Broken models: each gives its line and its remedy; a good one is read without its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from foretoken import zoo
from foretoken.doctor import checkpoint
from foretoken.doctor.finding import Finding
from foretoken.models.load import source_of
from helpers.tiny_models import save_model


def lines(model: str | Path, draft: str | None = None) -> dict[str, Finding]:
    return {each.check: each for each in checkpoint.check(str(model), draft)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of zoo:base without its heads."""
    folder = tmp_path / "base"
    shutil.copytree(zoo.path("base"), folder, ignore=shutil.ignore_patterns("eagle", "kangaroo", "diffuspec", "judge"))
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_bundled_model_is_fine_and_its_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.checkpoint_files.CheckpointFiles.weights", None)
    found = lines("zoo:base")
    assert {each.status for each in found.values()} == {"ok"}
    assert found["path"].found == "native (llama)"
    assert "zoo:draft: the same tokens" in found["draft model"].found
    assert "head eagle" in found


@pytest.mark.parametrize("sources", [(), ("config.json",), ("config.json", "generation_config.json")])
def test_an_end_token_that_nothing_or_one_file_names(base: Path, sources: tuple[str, ...]) -> None:
    for name in ("config.json", "generation_config.json"):
        change(base / name, eos_token_id=[2, 5] if name in sources else 2)
    found = lines(base)["end tokens"]
    if not sources:
        assert found.status == "fail"
        assert "'<|end|>' (5), which nothing names" in found.found
        assert "add 5 to eos_token_id" in found.remedy
    elif len(sources) == 1:  # generation_config.json decides, and it lacks the token
        assert found.status == "fail"
    else:
        assert found.status == "ok"


def test_an_end_token_that_only_one_file_names_is_a_warning(base: Path) -> None:
    change(base / "config.json", eos_token_id=2)
    found = lines(base)["end tokens"]
    assert found.status == "warn"
    assert "'<|end|>' (5) only by generation_config.json" in found.found


def test_a_truncated_and_a_missing_weight_file(base: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert lines(base)["files"].found == "model.safetensors lacks its last 1,000 bytes"
    weights.unlink()
    assert lines(base)["files"].status == "fail"


def test_a_draft_of_another_vocabulary_and_one_of_fewer_positions(base: Path) -> None:
    other = lines(base, str(_other(base)))["draft model"]
    assert "another vocabulary" in other.found
    assert (other.status, "translates" in other.remedy) == ("warn", True)  # it drafts, at a cost
    change(base / "config.json", max_position_embeddings=64)
    assert "64 of its 4,096 positions" in lines("zoo:base", str(base))["draft model"].found


def test_a_head_that_is_named_as_the_draft_model(base: Path) -> None:
    head = str(zoo.path("base") / "eagle")
    own = lines("zoo:base", head)["draft model"]
    assert own.status == "ok"
    assert "a head of method 'eagle', trained for these weights" in own.found
    change(base / "config.json", rope_theta=5000.0)
    changed = lines(base, head)["draft model"]
    assert (changed.status, "other weights, those of 'zoo:base'" in changed.found) == ("warn", True)
    other = lines("zoo:draft", head)["draft model"]
    assert (other.status, "for a width of 384; the model's is 192" in other.found) == ("fail", True)


def _other(base: Path) -> Path:
    """A model with one token of another name."""
    other = base.parent / "other"
    shutil.copytree(base, other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    last = tokens["added_tokens"][-1]
    last["content"] += "!"
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    return other


def test_a_head_of_other_weights_is_named(base: Path) -> None:
    shutil.copytree(Path(source_of("zoo:base")) / "kangaroo", base / "kangaroo")
    assert lines(base)["head kangaroo"].status == "ok"
    change(base / "config.json", rope_theta=123.0)
    assert lines(base)["head kangaroo"].status == "fail"


def test_a_family_without_native_code_and_a_template_that_fails(base: Path) -> None:
    change(base / "config.json", model_type="biogpt", hidden_act="gelu")
    (base / "chat_template.jinja").write_text("{{ messages[0].nothing.at_all }}")
    found = lines(base)
    assert found["path"].found == "general: no native code knows the family 'biogpt'"
    assert found["template"].status == "fail"


def test_gpt2_s_layers_are_looked_at_as_they_are_loaded(tmp_path: Path) -> None:
    assert lines(save_model("gpt2", tmp_path))["path"].found == "native (gpt2)"


@pytest.mark.parametrize("model", ["./nowhere", "unknown/model"])
def test_a_model_that_is_not_here_is_one_line(model: str) -> None:
    (only,) = lines(model).values()
    assert (only.check, only.status) == ("model", "fail")


def test_a_model_that_is_not_made_to_generate() -> None:
    assert "not a causal language model" in lines("zoo:diffusion")["model"].found
