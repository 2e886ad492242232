"""PARD: one forward over the text and mask tokens fills a draft, and keeps no mask row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.core.draft import PointMass, Sampled
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.protocols import Budget
from foretoken.drafters.pard import PardDrafter
from foretoken.drafting.published.folder import method_for
from foretoken.engine.request import Request
from foretoken.models.load import load, load_as_is
from helpers.requests import make_request
from helpers.tiny_models import save_model

MASK, TEXT = 100, [5, 9, 14, 23, 41, 7, 88, 3, 20, 77, 15, 16]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model with the key of PARD; its table has padding rows."""
    place = tmp_path_factory.mktemp("pard")
    draft = save_model("qwen3", place / "draft", seed=1, vocab_size=128)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return save_model("llama", place / "target"), draft


@pytest.fixture
def drafter(folders: tuple[Path, Path]) -> PardDrafter:
    target, draft = folders
    return PardDrafter(PardDrafter.Config(model=str(draft), slots=5), load(str(target), device="cpu"))


def request(tokens: list[int], **params: Any) -> Request:
    return make_request(tokens, vocab_size=101, max_tokens=100, **params)


@torch.inference_mode()
def filled(draft: Path, text: list[int], count: int) -> torch.Tensor:
    """The distributions, by one forward without a cache: [count, V]."""
    model = load_as_is(str(draft), device="cpu").model
    logits = model(torch.tensor([[*text, *[MASK] * (count - 1)]])).logits[0, -count:, :101]
    return logits.softmax(-1)


def test_every_token_has_the_distribution_of_its_own_row(drafter: PardDrafter, folders: tuple[Path, Path]) -> None:
    text = list(TEXT)
    for further in ([], [11, 12, 13], [8]):  # after nothing, after accepted tokens, after a refusal
        text += further
        (draft,) = drafter.propose([request(text, temperature=1.0)], [Budget(5, 5)])
        assert isinstance(draft.law, Sampled)
        torch.testing.assert_close(draft.law.q_KV, filled(folders[1], text, 5), rtol=1e-4, atol=1e-5)
        (greedy,) = drafter.propose([request(text)], [Budget(5, 5)])
        assert isinstance(greedy.law, PointMass)
        assert list(greedy.tree.tokens) == filled(folders[1], text, 5).argmax(-1).tolist()


def test_requests_of_other_lengths_do_not_mix(drafter: PardDrafter, folders: tuple[Path, Path]) -> None:
    asked = [request(TEXT), request(TEXT[:3]), request(TEXT[2:])]
    drafts = drafter.propose(asked, [Budget(5, 5), Budget(2, 9), Budget(9, 3)])
    for each, draft, count in zip(asked, drafts, (5, 2, 3), strict=True):
        assert list(draft.tree.tokens) == filled(folders[1], each.tokens, count).argmax(-1).tolist()


def test_a_refused_draft_leaves_no_row(drafter: PardDrafter) -> None:
    """Planted: with the mask rows kept, the next forward would read fewer tokens."""
    asked = request(list(TEXT))
    drafter.propose([asked], [Budget(5, 5)])
    assert sum(drafter.cache.lengths) == len(TEXT)
    before = drafter.model.layer_rows
    asked.tokens += [11, 12]
    drafter.propose([asked], [Budget(3, 3)])
    assert drafter.model.layer_rows - before == (2 + 2) * drafter.model.num_layers


def test_the_folder_says_that_it_is_pard(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    assert method_for(draft) == "pard"
    assert method_for(target) == "draft_model"
    params = SamplingParams(max_tokens=20, temperature=0)
    plain = LLM(str(target), device="cpu", speculative_config=None).generate(["abc", "Tom"], params)
    llm = LLM(str(target), device="cpu", speculative_config={"model": str(draft)})
    assert (llm.recipe.method, llm.recipe.drafter.sources) == ("auto", ("suffix", "pard"))
    assert [each.token_ids for each in llm.generate(["abc", "Tom"], params)] == [each.token_ids for each in plain]


def test_a_model_without_a_mask_token_is_refused(folders: tuple[Path, Path]) -> None:
    target = load(str(folders[0]), device="cpu")
    with pytest.raises(ModelError, match="has no pard_token"):
        PardDrafter(PardDrafter.Config(model=str(folders[0])), target)
    with pytest.raises(ConfigError, match="mask_token=128: "):
        PardDrafter(PardDrafter.Config(model=str(folders[1]), mask_token=128), target)
