"""The golden scenarios on a GPU, against the library's plain attention there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.models.load import load
from helpers import golden
from helpers.golden import Session
from helpers.tiny_models import VOCAB_SIZE, load_eager, save_model

pytestmark = pytest.mark.gpu

NAMES = ["llama", "mistral", "gemma2", "gpt_oss"]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 means float32 here."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("scenario", golden.SCENARIOS)
@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_the_library(name: str, scenario: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    model = load(tmp_path, dtype="float32", device="cuda")
    reference = load_eager(tmp_path, device="cuda")
    assert golden.worst(Session(model), reference, scenario, VOCAB_SIZE) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_are_as_near_as_the_library(name: str, dtype: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    ours = load(tmp_path, dtype=dtype, device="cuda")
    exact, plain = load_eager(tmp_path, device="cuda"), load_eager(tmp_path, getattr(torch, dtype), "cuda")
    for scenario in ("tree", "ragged_batch"):
        for logits, sequences in golden.SCENARIOS[scenario](Session(ours), VOCAB_SIZE):
            expected = golden.reference_rows(exact, sequences)
            usual = golden.reference_rows(plain, sequences).float()
            error = (logits.float() - expected).square().mean().sqrt()
            assert error < 2 * (usual - expected).square().mean().sqrt()


@pytest.mark.parametrize("name", NAMES)
def test_rejected_rows_leave_no_trace(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    model = load(tmp_path, dtype="float32", device="cuda")
    found = []
    for drafts in (False, True):
        session = Session(model)
        slot = session.cache.acquire()
        session.chunk(slot, golden.tokens_of(1, 9, VOCAB_SIZE))
        if drafts:
            session.draft(slot, 3, golden.random_tree(2, VOCAB_SIZE))
        found.append(session.chunk(slot, [4, 5, 6]))
    assert torch.equal(*found)
