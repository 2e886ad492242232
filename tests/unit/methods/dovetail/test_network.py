"""Dovetail's gate and blocks: reference arithmetic and limits, served natively and by torch, saved, aligned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError
from foretoken.drafting.feature_heads import pair_network
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.engine import compose
from foretoken.methods.dovetail.network import Dovetail, DovetailConfig, GatedFusion
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.feature_heads import (
    Change,
    assert_a_wrong_description_is_seen,
    assert_all_equal_the_plain_forward,
    difference,
    edit,
    gone,
    read_text,
    retensor,
    save_tiny,
)
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained

SHAPES: dict[str, dict[str, Any]] = {
    "one": {"layers": 1},
    "three, few tokens": {"layers": 3, "draft_vocab_size": 40},
    "concatenated": {"layers": 2, "fusion": "concat"},
    "as others": {"layers": 2, "norm_heads": True, "attention_bias": True},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sizes that the native decoder takes."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny: Path) -> LanguageModel:
    return load(str(tiny), device="cpu")


# ------------------------------------------------------------------ the gate


def drawn(rows: int, width: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def gate_of(model: LanguageModel) -> GatedFusion:
    return random_part(Dovetail, model, layers=1).fusion


def test_the_gate_is_the_paper_s(model: LanguageModel) -> None:
    """f = g h1 + (1 - g) h2, number by number, from the released code's formulas."""
    fusion, feature, token = gate_of(model), drawn(3), drawn(3, seed=1)
    with torch.no_grad():
        found = fusion(feature, token)
        weights = {name: each.double() for name, each in fusion.state_dict().items()}
    for row in range(3):
        e, f = token[row].double(), feature[row].double()
        normed = e / (e.square().mean() + fusion.norm.eps).sqrt() * weights["norm.weight"]
        h1, wide = weights["feature.weight"] @ f, weights["token.weight"] @ normed
        h2 = wide / (1 + (-wide).exp())
        gate = 1 / (1 + (-(weights["gate.weight"] @ torch.cat([h1, h2]))).exp())
        torch.testing.assert_close(found[row].double(), gate * h1 + (1 - gate) * h2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["feature", "token"])
def test_the_gate_s_limits(side: str, model: LanguageModel) -> None:
    """g -> 1 gives F W1, g -> 0 gives the token's half."""
    fusion, feature, token = gate_of(model), drawn(4), drawn(4, seed=1)
    with torch.no_grad():
        h1, h2 = fusion.feature(feature), F.silu(fusion.token(fusion.norm(token)))
        fusion.gate.weight.zero_()
        torch.testing.assert_close(fusion(feature, token), (h1 + h2) / 2)
        sign = 1.0 if side == "feature" else -1.0
        for row in range(4):  # a gate that this row's h1 opens, or shuts, wholly
            fusion.gate.weight.copy_(sign * 1e3 * torch.cat([h1[row], 0 * h1[row]]).expand(64, 128))
            expected = h1 if side == "feature" else h2
            torch.testing.assert_close(fusion(feature, token)[row], expected[row])


def test_a_gate_that_is_swapped_is_seen(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: (1 - g) h1 + g h2."""
    head, feature, token = random_part(Dovetail, model, layers=1), drawn(3), drawn(3, seed=1)
    with torch.no_grad():
        expected = head.fusion(feature, token)
        torch.testing.assert_close(head.enter(feature, token)[1], expected, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(pair_network, "gated", lambda h1, h2, z: z.sigmoid() * h2 + (1 - z.sigmoid()) * h1)
        assert float((head.enter(feature, token)[1] - expected).abs().max()) > 1e-2


# ------------------------------------------------------------------ serving and training


@pytest.mark.parametrize("shape", SHAPES)
def test_serving_and_training_compute_the_plain_forward(shape: str, tiny: Path) -> None:
    """And no wrong field of the description goes unseen."""
    network = random_part(Dovetail, load(str(tiny), device="cpu"), **SHAPES[shape])
    assert_all_equal_the_plain_forward(network, tiny)
    assert_a_wrong_description_is_seen(network, tiny)


def test_a_head_sees_as_far_as_it_was_trained_to(tiny: Path) -> None:
    """In all ways of serving; one that sees everything gives other logits."""
    network = random_part(Dovetail, load(str(tiny), device="cpu"), layers=2, window=3)
    assert_all_equal_the_plain_forward(network, tiny, trained=False)
    far = random_part(Dovetail, load(str(tiny), device="cpu"), layers=2)
    assert difference(read_text(far, tiny).logits, read_text(network, tiny).logits) > 1e-3


def test_a_folder_from_before_windows_sees_everything(tiny: Path, tmp_path: Path) -> None:
    random_part(Dovetail, load(str(tiny), device="cpu"), layers=1).save(tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text())
    del settings["window"]
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    assert Dovetail.load(tmp_path).config.window is None


def test_the_first_block_alone_has_no_norm_before_attention(model: LanguageModel) -> None:
    names = set(random_part(Dovetail, model, layers=3).state_dict())
    assert [f"layers.{number}.input_layernorm.weight" in names for number in range(3)] == [False, True, True]
    assert "norm.weight" not in names
    assert all(f"layers.{number}.post_attention_layernorm.weight" in names for number in range(3))


def test_a_head_begins_near_the_target_s_own_feature(model: LanguageModel) -> None:
    """What enters the blocks has the feature in it, as it is."""
    head, feature = random_part(Dovetail, model, layers=1), drawn(64)
    with torch.no_grad():
        mixed = head.enter(feature, 0 * feature)[1]
    slope = float((mixed * feature).sum() / feature.square().sum())
    assert 0.7 < slope < 1.3


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_part_is_loaded(shape: str, model: LanguageModel, tmp_path: Path) -> None:
    head = random_part(Dovetail, model, **SHAPES[shape])
    head.save(tmp_path)
    again = Dovetail.load(tmp_path)
    assert again.config == head.config
    ours, theirs = again.tensors(), head.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


DAMAGE: dict[str, tuple[Change, type[ForetokenError], str]] = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ModelError, "has no Dovetail head"),
    "another kind": (edit(speculators_model_type="scylla"), ModelError, "speculators_model_type 'dovetail'"),
    "another fusion": (edit(fusion="concat"), ModelError, "the tensor fc.weight is missing"),
    "a fusion unknown": (edit(fusion="sum"), ModelError, "fusion='sum': 'gate' or 'concat'"),
    "more blocks": (edit(layers=3), ModelError, "the tensor layers.2.input_layernorm.weight is missing"),
    "no gate": (retensor(fusion__gate__weight=gone), ModelError, "the tensor fusion.gate.weight is missing"),
    "a flat gate": (retensor(fusion__gate__weight=lambda each: each[:, :64]), ModelError, "fusion.gate.weight is"),
    "no ids": (retensor(draft_ids=gone), ModelError, "draft_ids is missing"),
    "another width": (edit(target_width=128), MismatchError, "target_width is 128, but that of"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_heads(kind: str, model: LanguageModel, tmp_path: Path) -> None:
    folder = Path(untrained(Dovetail, model, tmp_path / "head", draft_vocab_size=40))
    damage, error, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(error) as caught:
        compose.build({"method": "dovetail", "head": str(folder)}, model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_of_another_target(model: LanguageModel, tmp_path: Path) -> None:
    folder = untrained(Dovetail, model, tmp_path / "head")
    other = load(save_model("qwen2", tmp_path / "other"), device="cpu")
    with pytest.raises(MismatchError, match="train one with 'foretoken train dovetail --target"):
        compose.build({"method": "dovetail", "head": folder}, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth=0"),
        ({"head": 3}, "head=3"),
        ({"tree": 1}, "tree=1"),
        ({"fusion": "gate"}, "unknown option 'fusion'"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str, model: LanguageModel, tmp_path: Path) -> None:
    folder = untrained(Dovetail, model, tmp_path / "head")
    with pytest.raises(ConfigError) as caught:
        compose.build({"method": "dovetail", "head": folder, **options}, model)
    assert message in str(caught.value)


def test_sizes_that_cannot_be(model: LanguageModel) -> None:
    fields = vars(random_part(Dovetail, model).config)
    for name, value in (("layers", 99), ("layers", "two"), ("fusion", 3)):
        with pytest.raises(ValueError, match=name):
            DovetailConfig(**{**fields, name: value})
