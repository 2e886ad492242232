"""Logits of our packed forward against the library's own plain attention, for every family that we show.

Errors are in units of the spread of the reference's logits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.models.adoption import families
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build as build_fused
from helpers import golden
from helpers.adapters import shelf
from helpers.golden import LayerPlan, Session
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, WINDOW, load_eager, save_model

# The weights are drawn wide, so rounding grows: the library in float32 is itself up to 1e-5 away from float64.
TOLERANCE = 6e-5
WRONG = 1e-2  # what a wrong mask or position has to exceed

# Families that run through the native decoder on CPU where it is compiled; then the library's layers are tested as
# well.
FUSED_TYPES = tuple(families.FAMILIES)

Pair = tuple[LanguageModel, Any]


@cache
def build(name: str) -> Pair:
    folder = save_model(name, shelf() / "architectures" / name)
    return load(folder, device="cpu"), load_eager(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return build(request.param)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if FAMILIES[name].model_type in FUSED_TYPES])
def fused_pair(request: pytest.FixtureRequest) -> Pair:
    return build(request.param)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scenario", golden.SCENARIOS)
def test_logits_equal_the_library(pair: Pair, scenario: str) -> None:
    model, reference = pair
    assert golden.worst(Session(model), reference, scenario, VOCAB_SIZE) < TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize("scenario", golden.SCENARIOS)
def test_logits_through_the_layers_equal_the_library(fused_pair: Pair, scenario: str) -> None:
    model, reference = fused_pair
    if model.native_decoder is None:
        pytest.skip("no native decoder here: the layers were tested above")
    assert golden.worst(Session(model, plan=LayerPlan), reference, scenario, VOCAB_SIZE) < TOLERANCE


@pytest.mark.skipif(build_fused.library() is None, reason="no C compiler on this machine: the native path is off")
def test_the_tests_run_the_fused_decoder(fused_pair: Pair) -> None:
    model, _ = fused_pair
    first = model.config.per_layer_config[0]
    odd = getattr(first, "head_dim", None) == 12 or getattr(model.config, "moe_intermediate_size", None) == 24
    assert (model.native_decoder is None) == odd


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.windowed])
def test_windows_are_in_force(name: str) -> None:
    """Else the golden tests of windowed families would prove nothing about windows."""
    model, _ = build(name)
    windows: set[int | None] = set()

    class Watch(LayerPlan):
        def attend(self, layer: int, *args: Any, window: int | None = None, **others: Any) -> Tensor:
            windows.add(window)
            return super().attend(layer, *args, window=window, **others)

    session = Session(model, plan=Watch)
    session.chunk(session.cache.acquire(), [5, 6])
    assert WINDOW in windows


# ------------------------------------------------------------------ what must not pass


def error_of_tree(model: LanguageModel, reference: Any, batch: PackedBatch, session: Session, tree: TokenTree) -> float:
    prompt = golden.tokens_of(5, 11, VOCAB_SIZE)
    ours = session.forward(batch)
    expected = golden.reference_rows(reference, golden.paths(prompt, 9, tree))
    return float((ours - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("fault", ["none", "mask", "position"])
def test_wrong_mask_or_position_is_seen(name: str, fault: str) -> None:
    """Negative control: siblings that see each other, or positions counted by row, are far outside the tolerance."""
    model, reference = build(name)
    session = Session(model)
    slot = session.cache.acquire()
    session.chunk(slot, golden.tokens_of(5, 11, VOCAB_SIZE), wanted=1)
    tree = golden.random_tree(6, VOCAB_SIZE)
    batch = PackedBatch()
    batch.add_tree(slot, 11, 9, tree)
    rows = 1 + len(tree)
    if fault == "mask":
        old = batch.segments[0]
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()
        batch.segments[0] = Segment(slot, 11, 0, rows, 0, seen, old.depths)
    elif fault == "position":
        batch.positions = list(range(11, 11 + rows))
    error = error_of_tree(model, reference, batch, session, tree)
    assert error < TOLERANCE if fault == "none" else error > WRONG


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_forgotten_window_is_seen(name: str) -> None:
    model, reference = build(name)

    class Forgetful(LayerPlan):
        def attend(self, layer: int, *args: Any, window: int | None = None, **others: Any) -> Tensor:
            return super().attend(layer, *args, window=None, **others)

    assert golden.worst(Session(model, plan=Forgetful), reference, "tree", VOCAB_SIZE) > WRONG


@pytest.mark.parametrize(
    ("name", "argument"), [("gemma2", "softcap"), ("gpt_oss", "sinks_H")], ids=["softcap", "sinks"]
)
def test_a_forgotten_argument_is_seen(name: str, argument: str) -> None:
    model, reference = build(name)

    class Forgetful(LayerPlan):
        def attend(self, layer: int, *args: Any, **others: Any) -> Tensor:
            others[argument] = None
            return super().attend(layer, *args, **others)

    assert golden.worst(Session(model, plan=Forgetful), reference, "chain", VOCAB_SIZE) > WRONG


# ------------------------------------------------------------------ sixteen bits


@pytest.mark.parametrize("plan", [golden.DensePlan, LayerPlan], ids=["fused", "layers"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_is_as_near_as_the_library(name: str, plan: Any, tmp_path: Path) -> None:
    """Against float32, our bfloat16 may be no worse than the library's own bfloat16 is, up to luck."""
    save_model(name, tmp_path)
    ours = load(tmp_path, dtype="bfloat16", device="cpu")
    exact, plain = load_eager(tmp_path), load_eager(tmp_path, torch.bfloat16)
    for scenario in ("tree", "ragged_batch"):
        for logits, sequences in golden.SCENARIOS[scenario](Session(ours, plan=plan), VOCAB_SIZE):
            expected = golden.reference_rows(exact, sequences)
            usual = golden.reference_rows(plain, sequences).float()
            error = (logits.float() - expected).square().mean().sqrt()
            assert error < 1.5 * (usual - expected).square().mean().sqrt()
            assert error < 0.1 * expected.std()


# ------------------------------------------------------------------ levels


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_level_by_level_equals_all_at_once(name: str) -> None:
    """A draft model reads its tree as it grows; the rows are those of the packed tree."""
    model, _ = build(name)
    tree = golden.random_tree(3, VOCAB_SIZE)
    prompt = golden.tokens_of(4, 7, VOCAB_SIZE)
    found = []
    for read in (Session.draft, Session.levels):
        session = Session(model)
        slot = session.cache.acquire()
        session.chunk(slot, prompt)
        found.append(read(session, slot, 8, tree))
    assert (found[0] - found[1]).abs().max() / found[0].std() < TOLERANCE
