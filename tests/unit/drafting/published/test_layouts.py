"""The layout of a folder, and the layouts that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretoken import catalog
from foretoken.cli.shared.settings import RecipeFlags
from foretoken.core.errors import ModelError
from foretoken.drafting.published.folder import BIN, method_for, tensor_names, tensors_of
from foretoken.drafting.published.layouts import LAYOUTS, recognise
from helpers.gguf_files import vocabulary

REFUSED = {
    "Medusa": ({"medusa_num_heads": 3}, ["0.0.linear.weight"]),
    "Medusa without its config": ({}, ["medusa_head.0.0.linear.weight"]),
    "Hydra": ({"hydra_num_heads": 4}, ["hydra_head.0.weight"]),
    "MLP speculator": ({"model_type": "mlp_speculator"}, ["speculator.emb.0.weight"]),
    "Domino": ({"model_type": "qwen3"}, ["prefix_gru.weight_ih_l0"]),
    "MTP of speculators": ({"speculators_model_type": "mtp"}, ["mtp_layers.0.input_proj.weight"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_drafter_that_is_not_run_is_refused_with_its_reason(kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        recognise(*REFUSED[kind])
    name = kind.removesuffix(" without its config")
    assert str(caught.value).startswith(f"{name}: ")
    assert len(str(caught.value)) > len(name) + 20


def test_tensors_of_nothing_known_are_named() -> None:
    with pytest.raises(ModelError, match=r"its tensors are a\.weight, b\.weight"):
        recognise({}, ["b.weight", "a.weight"])


def test_every_layout_is_run_by_a_method_or_refused() -> None:
    drafters = {entry.name for entry in catalog.entries("drafter")}
    assert all(layout.refused or layout.method in {*drafters, ""} for layout in LAYOUTS)


@pytest.mark.parametrize(
    ("config", "names", "method"),
    [
        ({"model_type": "llama"}, ["model.embed_tokens.weight", "model.norm.weight"], "draft_model"),
        ({"model_type": "llama"}, ["midlayer.hidden_norm.weight", "fc.weight"], "eagle"),
        ({"model_type": "llama"}, ["layers.0.self_attn.q_proj.weight", "fc.weight"], "eagle"),
        ({"speculators_model_type": "scylla"}, ["fc.weight"], "scylla"),
        ({"model_type": "gemma4_unified_assistant"}, ["pre_projection.weight"], "gemma4_assistant"),
    ],
)
def test_a_folder_says_its_method(config: dict[str, Any], names: list[str], method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    assert sorted(tensor_names(tmp_path)) == sorted(names)
    assert method_for(tmp_path) == method
    assert RecipeFlags(draft_model=str(tmp_path)).config("zoo:base") == {"method": "auto", "model": str(tmp_path)}
    chosen = RecipeFlags(method=method, draft_model=str(tmp_path)).config("zoo:base")
    assert chosen == {"method": method, "model": str(tmp_path)}


def test_a_name_that_is_no_folder_is_a_draft_model(tmp_path: Path) -> None:
    assert method_for("someone/their-model") == method_for("zoo:draft") == method_for(tmp_path) == "draft_model"


def test_a_gguf_file_says_its_method(tmp_path: Path) -> None:
    for kind, method in (("llama", "draft_model"), ("eagle3", "eagle"), ("dflash", "dflash")):
        assert method_for(vocabulary(tmp_path / f"{kind}.gguf", {"general.architecture": kind})) == method
    with pytest.raises(ModelError, match=r"assistant\.gguf: Gemma 4 assistant: it is not read from GGUF files"):
        method_for(vocabulary(tmp_path / "assistant.gguf", {"general.architecture": "gemma4-assistant"}))
    assert method_for(tmp_path / "missing.gguf") == "draft_model"


def test_files_of_torch_are_found_by_their_index(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "one.bin")
    torch.save({"b": torch.ones(3)}, tmp_path / "two.bin")
    placed = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    (tmp_path / f"{BIN}.index.json").write_text(json.dumps(placed))
    assert tensor_names(tmp_path) == ["a", "b"]
    assert {name: len(value) for name, value in tensors_of(tmp_path).items()} == {"a": 2, "b": 3}
