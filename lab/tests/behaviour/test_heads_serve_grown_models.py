"""A head over the final state drafts for models grown from its target as for the target: in place and apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import MismatchError
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.scylla.network import Scylla
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.feature_heads import (
    assert_all_equal_the_plain_forward,
    difference,
    read_text,
    runner_of,
    save_tiny,
    served_logits,
    unrolled_logits,
)
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import with_config

SIZE = "0.6m"  # twice as wide, and deeper
PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "scylla": (Scylla, {}),
    "dovetail": (Dovetail, {"budget": "fixed", "place": "thread"}),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library()  # the native decoder comes from the user's own cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def drafted(model: Any, method: str, **options: Any) -> list[Any]:
    settings = {"width": 3, "max_depth": 3, "num_speculative_tokens": 4, **options}
    llm = with_config({"method": method, **settings}, target=model)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": tokens_of(seed, 9, 100)} for seed in range(3)], params)
    llm.close()
    return [(each.token_ids, each.metrics.num_draft_tokens, each.metrics.num_accepted_tokens) for each in outputs]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # tied, and with a head of its own
@pytest.mark.parametrize("method", PARTS)
def test_the_drafts_are_those_of_the_original(
    method: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found without an option; planted: the first copy is taken with its share, which is a half."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    folder = save_model(family, tmp_path / "original", **sizes)
    original = load(str(folder), device="cpu")
    part, options = PARTS[method]
    untrained(part, original, folder / method, layers=2, draft_vocab_size=60)
    wide = load(f"grown:{folder}:{SIZE}", device="cpu")
    assert wide.config.hidden_size == 128
    theirs = drafted(original, method, **options)
    assert drafted(wide, method, **options) == theirs
    assert sum(count for _, count, _ in theirs) > 100
    monkeypatch.setattr(part, "fuse", lambda self, states_TF: states_TF[..., :64])
    assert drafted(wide, method, **options) != theirs


def test_a_narrow_head_needs_tables_of_its_own(tmp_path: Path) -> None:
    model = load(str(save_model("llama", tmp_path / "target", hidden_size=64)), device="cpu")
    head = random_part(Dovetail, model, width=32)
    with pytest.raises(MismatchError, match="without tables of its own it must be as wide"):
        head.check_target(model)
    assert torch.equal(head.fuse(torch.ones(1, 64)), torch.full((1, 32), 2.0))


@pytest.mark.parametrize("kind", [Scylla, Dovetail])
def test_a_narrow_network_computes_the_plain_forward(kind: Any, tmp_path: Path) -> None:
    """It reads twice the first columns. Planted: those columns once, and others."""
    folder = save_tiny(tmp_path)
    config = random_part(kind, load(str(folder), device="cpu"), width=32, layers=2, draft_vocab_size=40).config
    network = kind(config, ids_K=torch.arange(40), own_head=True, own_embedding=True).eval()
    network.draw(torch.Generator().manual_seed(0), spread=0.2)
    assert_all_equal_the_plain_forward(network, folder)
    text = read_text(network, folder)
    for states_TF in (text.states_TF / 2, text.states_TF.roll(1, -1)):
        other = replace(text, states_TF=states_TF)
        assert difference(unrolled_logits(network, other), text.logits) > 1e-3
        assert difference(served_logits(runner_of(network, folder, "native"), other), text.logits) > 1e-3
