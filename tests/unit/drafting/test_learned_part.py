"""Learned parts: their folders in both layouts, refusals, and untrained parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import catalog, zoo
from foretoken.core.errors import ConfigError, ModelError
from foretoken.drafting.learned_part import CONFIG, WEIGHTS, LearnedPart, find, find_all, lies_beside
from foretoken.drafting.published.folder import INDEX
from foretoken.methods.judge.network import JudgeHead
from foretoken.methods.kangaroo.network import Adapter
from foretoken.methods.sprinter.network import SprinterHead
from foretoken.models.load import load
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import target

PARTS: list[type[LearnedPart]] = [Adapter, SprinterHead, JudgeHead]
EVERY = sorted({entry.load().declared.learned_part for entry in catalog.entries()} - {None})


def assert_same(one: LearnedPart, other: LearnedPart) -> None:
    assert one.config == other.config
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_part_lies_next_to_the_file_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert not lies_beside(Adapter, str(file))
    random_part(Adapter, target()).save(tmp_path / Adapter.algorithm)
    assert lies_beside(Adapter, str(file))
    assert lies_beside(Adapter, str(tmp_path))


@pytest.mark.parametrize("kind", PARTS)
def test_a_saved_part_is_loaded(kind: type[LearnedPart], tmp_path: Path) -> None:
    part = random_part(kind, target())
    part.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    settings = json.loads((tmp_path / CONFIG).read_text())
    assert settings["architectures"] == [kind.__name__]
    assert settings["speculators_model_type"] == settings["speculators_config"]["algorithm"] == kind.algorithm
    assert settings["speculators_config"]["verifier"]["name_or_path"] == "zoo:base"
    assert_same(kind.load(tmp_path), part)


def split(folder: Path) -> None:
    """Its weights in two files and an index, as the library writes large models."""
    tensors = load_file(folder / WEIGHTS)
    placed = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(placed.values()):
        save_file({name: tensors[name] for name in tensors if placed[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("kind", PARTS)
def test_weights_in_several_files_are_loaded(kind: type[LearnedPart], tmp_path: Path) -> None:
    part = random_part(kind, target())
    part.save(tmp_path)
    split(tmp_path)
    assert_same(kind.load(tmp_path), part)


def test_several_files_of_which_one_is_missing_or_lies_elsewhere(tmp_path: Path) -> None:
    untrained(Adapter, target(), tmp_path)
    split(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"its file model-00002-of-00002.safetensors is missing"):
        Adapter.load(tmp_path)
    for placed in ({"fc.weight": "../elsewhere.safetensors"}, ["model.safetensors"], {"fc.weight": 3}):
        (tmp_path / INDEX).write_text(json.dumps({**index, "weight_map": placed}))
        with pytest.raises(ModelError, match=r"weight_map names something else than files next to it"):
            Adapter.load(tmp_path)


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_never_replaces_a_model_or_another_part(kind: type[LearnedPart], tmp_path: Path) -> None:
    for content in ('{"model_type": "llama"}', "{", json.dumps({"speculators_model_type": "other"})):
        (tmp_path / CONFIG).write_text(content)
        with pytest.raises(ConfigError, match=r"--out .*: another model lies there; name a folder to make"):
            random_part(kind, target()).save(tmp_path)
        assert (tmp_path / CONFIG).read_text() == content
        assert not (tmp_path / WEIGHTS).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="this is a file"):
        kind.check_place(tmp_path / "file")


@pytest.mark.parametrize("kind", PARTS)
def test_a_folder_of_another_kind_of_part_is_refused(kind: type[LearnedPart], tmp_path: Path) -> None:
    other = next(each for each in PARTS if each is not kind)
    untrained(other, target(), tmp_path)
    with pytest.raises(ModelError, match=f"is not of a {kind.title}"):
        kind.load(tmp_path)


@pytest.mark.parametrize("place", EVERY)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_before_anything_runs(place: str, value: float, tmp_path: Path) -> None:
    kind = catalog.imported(place)
    untrained(kind, target(), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    name = max((name for name in weights if weights[name].is_floating_point()), key=lambda name: weights[name].numel())
    weights[name].view(-1)[-1] = value
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=rf"cannot be read \('{name}' holds NaN or infinite values\): copy it again"):
        kind.load(tmp_path)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (None, "speculators_config=None: an object"),
        ({"verifier": "zoo:base"}, "speculators_config.verifier='zoo:base': an object with name_or_path and fingerpr"),
        ({"verifier": {"name_or_path": "x"}}, "speculators_config.verifier={'name_or_path': 'x'}: an object with"),
        ({}, "speculators_config.verifier=None: an object with name_or_path and fingerprint"),
    ],
)
@pytest.mark.parametrize("kind", PARTS)
def test_a_config_must_name_its_target(kind: type[LearnedPart], owners: Any, message: str, tmp_path: Path) -> None:
    untrained(kind, target(), tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**settings, "speculators_config": owners}))
    with pytest.raises(ModelError, match=re.escape(message)):
        kind.load(tmp_path)


@pytest.mark.parametrize("kind", PARTS)
def test_missing_tensors_and_settings_are_named(kind: type[LearnedPart], tmp_path: Path) -> None:
    untrained(kind, target(), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    name = max(weights)
    save_file({other: values for other, values in weights.items() if other != name}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=f"{re.escape(name)}.* is missing|Missing key.*{re.escape(name)}"):
        kind.load(tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text())
    del settings["feature" if kind is SprinterHead else "width"]
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"cannot be read \('(width|feature)' is missing\)"):
        kind.load(tmp_path)


def test_a_part_next_to_the_weights_is_found() -> None:
    depths = [adapter.config.exit_layer for adapter in find_all(Adapter, None, target())]
    assert depths == [1, 2]
    assert find(JudgeHead, None, target()).config.target == "zoo:base"
    draft = load("zoo:draft", device="cpu")
    assert find(SprinterHead, "", target(), draft).config.draft == "zoo:draft"


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Adapter, {"exit_layer": 3}), (SprinterHead, {"feature": "post", "draft": "zoo:draft"}), (JudgeHead, {})],
)
def test_untrained_it_fits_and_is_drawn_again_alike(
    kind: type[LearnedPart], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = untrained(kind, target(), tmp_path / "new", **options)
    part = find(kind, folder, target(), load("zoo:draft", device="cpu") if kind is SprinterHead else None)
    again = kind.load(Path(untrained(kind, target(), tmp_path / "again", **options)))
    assert_same(part, again)
    assert len({float(values.float().std()) for values in part.tensors().values() if values.numel() > 1} - {0.0})


def test_bundled_parts_have_the_present_layout() -> None:
    for name in ("base", "draft", "long"):
        for config in sorted(zoo.path(name).glob("**/config.json")):
            if config.parent != zoo.path(name):
                assert json.loads(config.read_text())["speculators_config"]["verifier"]["fingerprint"]
