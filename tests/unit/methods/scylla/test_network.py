"""Scylla's layers in their forms: served natively and by torch, unrolled, saved, damaged, and of another target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.engine import compose
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.scylla.network import Scylla
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.feature_heads import (
    Change,
    assert_a_wrong_description_is_seen,
    assert_all_equal_the_plain_forward,
    difference,
    edit,
    first_column,
    gone,
    layer_by_hand,
    read_text,
    retensor,
    rms,
    save_tiny,
)
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import target

SHAPES: dict[str, dict[str, Any]] = {
    "one": {"layers": 1},
    "three, few tokens": {"layers": 3, "draft_vocab_size": 40},
    "as others": {"layers": 2, "norm_heads": True, "attention_bias": True, "norm_output": False},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sizes that the native decoder takes."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny: Path) -> LanguageModel:
    return load(str(tiny), device="cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_serving_and_training_compute_the_plain_forward(shape: str, tiny: Path) -> None:
    """And no wrong field of the description goes unseen."""
    network = random_part(Scylla, load(str(tiny), device="cpu"), **SHAPES[shape])
    assert_all_equal_the_plain_forward(network, tiny)
    assert_a_wrong_description_is_seen(network, tiny)


def test_a_head_sees_as_far_as_it_was_trained_to(tiny: Path) -> None:
    """In all ways of serving; one that sees everything gives other logits."""
    network = random_part(Scylla, load(str(tiny), device="cpu"), layers=2, window=3)
    assert_all_equal_the_plain_forward(network, tiny, trained=False)
    far = random_part(Scylla, load(str(tiny), device="cpu"), layers=2)
    assert difference(read_text(far, tiny).logits, read_text(network, tiny).logits) > 1e-3


def test_a_folder_from_before_windows_sees_everything(tiny: Path, tmp_path: Path) -> None:
    random_part(Scylla, load(str(tiny), device="cpu"), layers=1).save(tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text())
    del settings["window"]
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    assert Scylla.load(tmp_path).config.window is None


@torch.inference_mode()
def test_the_first_pair_by_hand(model: LanguageModel) -> None:
    """fc([e; f]), layers with both norms, the final norm: written out for a pair that sees itself only."""
    head = random_part(Scylla, model, layers=2)
    config, weights = head.config, head.state_dict()
    f, e = torch.randn(2, config.width, generator=torch.Generator().manual_seed(2))
    x = weights["fc.weight"] @ torch.cat([e, f])
    for number in range(2):
        begin = f"layers.{number}."
        own = {name.removeprefix(begin): each for name, each in weights.items() if name.startswith(begin)}
        x = layer_by_hand(own, config, rms(x, own["input_layernorm.weight"], config.norm_eps), x)
    expected = rms(x, weights["norm.weight"], config.norm_eps)
    torch.testing.assert_close(first_column(head, f, e.repeat(10, 1), 9), expected, rtol=1e-4, atol=1e-4)


def test_every_layer_counts(model: LanguageModel) -> None:
    """Planted: the second layer left out is another distribution."""
    head = random_part(Scylla, model, layers=2)
    less = random_part(Scylla, model, layers=1)
    less.load_state_dict({name: each for name, each in head.state_dict().items() if "layers.1" not in name})
    g_TW, found = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), []
    for each in (head, less):
        run, batch = Runner(model, each), PackedBatch()
        cache = KVCache(run.num_layers, 1, 64)
        cache.reserve(cache.acquire(), 16)
        batch.add_chunk(0, 0, tokens_of(1, 5, 100), wanted=1)
        found.append(run.forward(batch, cache, g_TW, top=0)[0].logits_MV.clone())
    assert float((found[0] - found[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_part_is_loaded(shape: str, model: LanguageModel, tmp_path: Path) -> None:
    head = random_part(Scylla, model, **SHAPES[shape])
    head.save(tmp_path)
    again = Scylla.load(tmp_path)
    assert again.config == head.config
    ours, theirs = again.tensors(), head.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


DAMAGE: dict[str, tuple[Change, type[ForetokenError], str]] = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ModelError, "has no Scylla head"),
    "another kind": (edit(speculators_model_type="eagle3"), ModelError, "speculators_model_type 'scylla'"),
    "more layers": (edit(layers=3), ModelError, "the tensor layers.2.input_layernorm.weight is missing"),
    "fewer layers": (edit(layers=1), ModelError, "the tensor layers.1.input_layernorm.weight is not of such a head"),
    "layers in words": (edit(layers="two"), ModelError, "layers='two'"),
    "too many layers": (edit(layers=99), ModelError, "layers=99: 32 at most"),
    "no rate": (edit(rope_theta=10**400), ModelError, "rope_theta=1000"),
    "a larger vocabulary": (edit(draft_vocab_size=9000), ModelError, "draft_vocab_size=9000 is above"),
    "no ids": (retensor(draft_ids=gone), ModelError, "draft_ids is missing"),
    "ids that fall": (retensor(draft_ids=lambda each: each.flip(0)), ModelError, "draft_ids: increasing tokens"),
    "ids that lead away": (retensor(draft_ids=lambda each: each + 9000), ModelError, "draft_ids: increasing"),
    "the id after the last": (
        retensor(draft_ids=lambda each: torch.cat([each[:-1], torch.tensor([101])])),
        ModelError,
        "draft_ids: increasing tokens below 101",
    ),
    "an id below 0": (
        retensor(draft_ids=lambda each: torch.cat([torch.tensor([-1]), each[1:]])),
        ModelError,
        "draft_ids: increasing",
    ),
    "an id twice": (
        retensor(draft_ids=lambda each: torch.cat([each[:1], each[:1], each[2:]])),
        ModelError,
        "draft_ids: increasing",
    ),
    "fewer ids": (retensor(draft_ids=lambda each: each[:10]), ModelError, "draft_ids is [10] of torch.int64"),
    "another width": (edit(target_width=128), MismatchError, "target_width is 128, but that of"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_heads(kind: str, model: LanguageModel, tmp_path: Path) -> None:
    folder = Path(untrained(Scylla, model, tmp_path / "head", draft_vocab_size=40))
    damage, error, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(error) as caught:
        compose.build({"method": "scylla", "head": str(folder)}, model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_untrained_head_scales_small_embeddings_up() -> None:
    """What an untrained head mixes in of a token is 0.3 / sqrt(2) large, whatever the size of the embeddings."""
    head = random_part(Scylla, target())
    table_VW = head.embedding_of(target().model).detach().float()
    mixed_VW = head.enter(torch.zeros_like(table_VW), table_VW)[1].detach()
    assert float(table_VW.std()) < 0.1
    assert float(mixed_VW.std()) == pytest.approx(0.3 / 2**0.5, rel=0.2)


def test_a_rope_theta_beyond_64_bit_integers_gives_finite_frequencies(model: LanguageModel, tmp_path: Path) -> None:
    folder = Path(untrained(Scylla, model, tmp_path / "head"))
    edit(rope_theta=10**20)(folder)
    compose.build({"method": "scylla", "head": str(folder)}, model)
    head = Scylla.load(folder)
    exponents = -torch.arange(head.config.head_dim // 2, dtype=torch.float64) / (head.config.head_dim // 2)
    torch.testing.assert_close(head.rates()[0], 1e20**exponents)


def test_a_missing_head_is_refused_with_its_command(model: LanguageModel) -> None:
    place = Path(model.source) / "scylla"
    with pytest.raises(
        ModelError, match=f"train scylla --target {model.name} --out {place}', or name one with --draft-model"
    ):
        compose.build({"method": "scylla"}, model)


def test_a_head_of_another_target(model: LanguageModel, tmp_path: Path) -> None:
    folder = untrained(Scylla, model, tmp_path / "head")
    other = load(save_model("qwen2", tmp_path / "other"), device="cpu")
    with pytest.raises(MismatchError, match="train one with 'foretoken train scylla --target"):
        compose.build({"method": "scylla", "head": folder}, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth=0"),
        ({"head": 3}, "head=3"),
        ({"widths": 3}, "widths=3"),
        ({"tree": 1}, "tree=1"),
        ({"layers": 2}, "unknown option 'layers'"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str, model: LanguageModel, tmp_path: Path) -> None:
    folder = untrained(Scylla, model, tmp_path / "head")
    with pytest.raises(ConfigError) as caught:
        compose.build({"method": "scylla", "head": folder, **options}, model)
    assert message in str(caught.value)
