"""A head without rows of its own scores by the target's head, and by all that the target does to its logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.drafting.feature_heads.runner import Runner
from foretoken.forward import attention
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.models.language_model import LanguageModel
from foretoken.native import build
from helpers.native_models import COMMON
from helpers.tiny_models import Family, save_model
from helpers.untrained import random_part

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 4.0}


@pytest.mark.parametrize(
    ("kind", "options"), [("gemma2", {"final_logit_softcapping": 0.5}), ("granite", _GRANITE), ("qwen3", {})]
)
def test_both_paths_score_alike(kind: str, options: dict[str, object], tmp_path: Path) -> None:
    folder = save_model(Family(kind, {**COMMON, **options}), tmp_path)

    def made(*, packed: bool) -> LanguageModel:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME).eval()
        return LanguageModel(model, None, name=str(folder), packed=packed)

    fused, general = made(packed=True), made(packed=False)
    assert fused.native_decoder is not None
    assert general.native_decoder is None
    head = random_part(Eagle, general)
    features_TW = torch.randn(5, head.config.width, generator=torch.Generator().manual_seed(0))
    found = []
    for target in (fused, general):
        runner, cache, batch = Runner(target, head), KVCache(1, 1, 64), PackedBatch()
        cache.reserve(cache.acquire(), 5)
        batch.add_chunk(0, 0, [5, 6, 7, 8, 9], wanted=5)
        output, following_MW = runner.forward(batch, cache, features_TW, top=3)
        found.append((output.logits_MV.float(), following_MW.float(), torch.tensor(output.top_shares)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    if kind == "gemma2":
        assert float(found[0][0].abs().max()) <= 0.5


@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_a_head_begins_with_the_gain_of_the_final_norm(kind: str, tmp_path: Path) -> None:
    """Which in some families is 1 + weight."""
    folder = save_model(Family(kind, COMMON), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME).eval()
    head = random_part(Eagle, LanguageModel(model, None, name=str(folder), packed=False))
    ones_D = torch.ones(COMMON["hidden_size"])
    assert head.norm is not None
    torch.testing.assert_close(head.norm.weight.detach(), model.model.norm(ones_D).detach(), rtol=1e-5, atol=1e-5)
