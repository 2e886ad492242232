"""Parts trained for a model serve models grown from it: the same drafts and judgements, without an option."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import MismatchError
from foretoken.engine import compose
from foretoken.methods.judge.network import JudgeHead
from foretoken.methods.kangaroo.network import Adapter
from foretoken.methods.sprinter.network import SprinterHead
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import with_config

SIZE = "0.6m"  # twice as wide, and deeper


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library()  # the native decoder comes from the user's own cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["llama", "qwen2"])  # tied, and with a head of its own
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    return save_model(request.param, tmp_path / "original", **options)


@pytest.fixture
def draft(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "draft"))


def pair(folder: Path) -> tuple[LanguageModel, LanguageModel]:
    original, wide = load(str(folder), device="cpu"), load(f"grown:{folder}:{SIZE}", device="cpu")
    assert wide.num_layers > original.num_layers
    assert wide.config.hidden_size > 64
    return original, wide


def written(target: LanguageModel, **config: Any) -> list[Any]:
    """Tokens, drafts and charges of three requests, greedy."""
    llm = with_config({"num_speculative_tokens": 4, **config}, target=target)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": tokens_of(seed, 9, 100)} for seed in range(3)], params)
    return [
        (each.token_ids, each.metrics.num_draft_tokens, each.metrics.num_accepted_tokens, each.metrics.distortion)
        for each in outputs
    ]


def test_an_adapter_drafts_the_same(folder: Path) -> None:
    """Chain and tree; from the depth that became of its own, with the adapter that lies on a shelf."""
    original, wide = pair(folder)
    for depth in (1, 2):
        untrained(Adapter, original, folder / "kangaroo" / f"exit-{depth}", exit_layer=depth)
    for options in ({"threshold": 0.0}, {"tree": True, "threshold": 0.0, "width": 3, "max_depth": 3}):
        ours, theirs = (written(each, method="kangaroo", **options) for each in (wide, original))
        assert ours == theirs
        assert sum(count for _, count, _, _ in ours) > 100


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_judge_judges_the_same(folder: Path, draft: Path) -> None:
    """It reads the state after the final norm, or before it; its accepted tokens are charged alike."""
    original, wide = pair(folder)
    save_model("llama", draft, seed=3, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    for normed, bias in ((True, -0.5), (False, 0.5)):
        head = random_part(JudgeHead, original, bias=bias)
        JudgeHead(type(head.config)(**{**vars(head.config), "normed": normed}), head.unit).save(folder / "judge")
        config = {"method": "draft_model", "model": str(draft), "verifier": "judge"}
        ours, theirs = (written(each, **config) for each in (wide, original))
        assert ours == theirs
        assert 0 < sum(charge for *_, charge in ours) < len(ours)  # some refused, some let stand


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_sprinter_head_serves_the_same_pair(folder: Path, draft: Path) -> None:
    original, wide = pair(folder)
    untrained(SprinterHead, original, draft / "sprinter", draft=str(draft), bias=0.3, spread=1.0)
    ours, theirs = (written(each, method="sprinter", model=str(draft)) for each in (wide, original))
    assert ours == theirs
    assert sum(count for _, count, _, _ in ours) > 10


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_parts_of_another_original_are_refused(folder: Path, draft: Path, tmp_path: Path) -> None:
    _, wide = pair(folder)
    other = load(
        str(save_model("llama", tmp_path / "other", seed=5, hidden_size=64, num_attention_heads=2)), device="cpu"
    )
    untrained(Adapter, other, tmp_path / "adapter")
    untrained(JudgeHead, other, tmp_path / "head")
    untrained(SprinterHead, other, tmp_path / "sprinter", draft=str(draft))
    for config in (
        {"method": "kangaroo", "adapter": str(tmp_path / "adapter")},
        {"method": "ngram", "verifier": "judge", "judge.head": str(tmp_path / "head")},
        {"method": "sprinter", "model": str(draft), "head": str(tmp_path / "sprinter")},
    ):
        with pytest.raises(MismatchError, match="not for"):
            compose.build(config, wide)
