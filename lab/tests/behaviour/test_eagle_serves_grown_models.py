"""A head of a model drafts for models grown from it: the same drafts, found without an option; and exceptions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import MismatchError, ModelError
from foretoken.engine import compose
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.models.load import load, load_as_is
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from foretoken.train.frozen_target import FrozenTarget
from foretoken_lab.models.grown import origin_of
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import PROMPTS, greedy, with_config

SIZE = "0.6m"  # twice as wide, and deeper


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library()  # the native decoder comes from the user's own cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["llama", "qwen2"])  # tied, and with a head of its own
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    return save_model(request.param, tmp_path / "original", **options)


def drafted(model: Any, **options: Any) -> list[Any]:
    llm = with_config({"method": "eagle", "num_speculative_tokens": 4, **options}, target=model)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": tokens_of(seed, 9, 100)} for seed in range(3)], params)


def test_the_drafts_are_those_of_the_original(folder: Path) -> None:
    """Chain and tree, draft for draft."""
    original = load(str(folder), device="cpu")
    untrained(Eagle, original, folder / "eagle", draft_vocab_size=60)
    name = f"grown:{folder}:{SIZE}"
    wide = load(name, device="cpu")
    assert wide.num_layers > original.num_layers
    assert wide.config.hidden_size > 64
    for options in ({}, {"tree": True, "width": 3, "max_depth": 3}):
        ours, theirs = drafted(wide, **options), drafted(original, **options)
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        counts = [
            [(each.metrics.num_draft_tokens, each.metrics.num_accepted_tokens) for each in found]
            for found in (ours, theirs)
        ]
        assert counts[0] == counts[1]
        assert sum(count for count, _ in counts[0]) > 100


def test_every_depth_is_that_of_the_original(folder: Path) -> None:
    """At each depth that a head may read; one depth off is another state."""
    name = f"grown:{folder}:{SIZE}"
    original, wide = (load_as_is(each, device="cpu").model for each in (str(folder), name))
    origin = origin_of(name, wide.config)
    assert origin is not None
    layers = original.config.num_hidden_layers
    ids = torch.tensor([tokens_of(2, 12, 100)])
    theirs = FrozenTarget(original, range(1, layers + 1)).states(ids)
    depths = [origin.depth(each) for each in range(1, layers + 1)]
    ours = FrozenTarget(wide, depths).states(ids)
    assert depths[-1] == wide.config.num_hidden_layers
    for depth, grown in enumerate(depths, 1):
        torch.testing.assert_close(ours[grown][..., :64], theirs[depth], rtol=1e-4, atol=1e-4)
    assert float((ours[depths[0]][..., :64] - theirs[2]).abs().max()) > 0.1


def test_what_does_not_grow_is_refused(folder: Path, tmp_path: Path) -> None:
    original = load(str(folder), device="cpu")
    wide = load(f"grown:{folder}:{SIZE}", device="cpu")
    with pytest.raises(ModelError, match="no EAGLE head for"):
        compose.build({"method": "eagle"}, wide)
    untrained(Eagle, original, tmp_path / "two", algorithm="eagle")
    untrained(Eagle, original, tmp_path / "normed", draft_vocab_size=60, norm_before_fc=True)
    for place in ("two", "normed"):
        with pytest.raises(MismatchError, match="only EAGLE-3 heads without norms"):
            compose.build({"method": "eagle", "head": str(tmp_path / place)}, wide)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    save_model("llama", other, seed=5, hidden_size=64, num_attention_heads=2, intermediate_size=128)
    untrained(Eagle, load(str(other), device="cpu"), tmp_path / "others", draft_vocab_size=60)
    with pytest.raises(MismatchError, match="target_hidden_size is 64"):
        compose.build({"method": "eagle", "head": str(tmp_path / "others")}, wide)


def test_the_bundled_head_drafts_for_zoo_base_without_an_option() -> None:
    llm = with_config({"method": "eagle", "num_speculative_tokens": 4})
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.token_ids == greedy(PROMPTS[0], 40)
    assert output.metrics.num_accepted_tokens >= 8
