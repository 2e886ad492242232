"""Drafting and training compute the head's forward pass over the library's own states of the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.methods.sprinter import drafter as drafting
from foretoken.methods.sprinter.labels import Collecting, collect
from foretoken.methods.sprinter.network import FEATURES, SprinterHead, facts_of
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.heads import head
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import with_config

every_feature = pytest.mark.parametrize("feature", FEATURES)
PROMPTS = ([1, 7, 30, 12], [1, 9, 9, 40, 41, 42, 60])


@pytest.fixture(scope="module", params=["llama", "exaone4"])  # with a native decoder, and without
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp("pair"))


def head_of(folder: Path, feature: str) -> SprinterHead:
    return head(feature, spread=0.5, target=folder, draft=folder, width=64)


def paper(folder: Path, sprinter: SprinterHead, tokens: Sequence[int]) -> Tensor:
    """v of every token of a text but the first, by the plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
    return sprinter.forward(output.hidden_states[-1][0], output.logits[0].softmax(-1), torch.tensor(list(tokens)))


def drafted_difference(folder: Path, served: SprinterHead, stated: SprinterHead, place: Path) -> float:
    """Largest difference between the v of a batch's drafts and the plain forward pass.

    Args:
        served, stated: the same head, unless a fault is planted.
    """
    served.save(place)
    config = {"method": "sprinter", "model": str(folder), "head": str(place), "max_draft": 5, "threshold": 0}
    llm = with_config(config, target=load(folder, device="cpu"))
    drafter: Any = llm.recipe.drafter
    propose, differences = drafter.propose, []

    def watched(contexts: Any, budgets: Any) -> Any:
        drafts = propose(contexts, budgets)
        for context, draft in zip(contexts, drafts, strict=True):
            judged = len(draft) - (served.config.feature == "post")  # the last token of a draft was not read
            if judged > 0:
                expected = paper(folder, stated, [*context.tokens, *draft.tree.tokens])[-len(draft) :][:judged]
                found = torch.tensor(draft.confidence[:judged])
                differences.append(float((found - expected).abs().max()))
        return drafts

    drafter.propose = watched
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    assert all(output.error is None for output in outputs)
    assert len(differences) > 2
    return max(differences)


def trained_difference(folder: Path, trained: SprinterHead, stated: SprinterHead) -> float:
    """Largest difference between the head on the inputs that training collects and the plain forward pass."""
    model = load(folder, device="cpu")  # its own draft: every label is 1, so the text is the draft's greedy one
    examples = collect(model, model, iter([list(PROMPTS[1])]), Collecting(count=6, steps=6))
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = list(PROMPTS[1])
    with torch.inference_mode():
        for _ in range(len(examples)):
            text.append(int(library(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    found = trained.judge(examples.features(trained.config.feature))
    return float((found - paper(folder, stated, text)[-len(examples) :]).abs().max())


@pytest.mark.covering(1)
@every_feature
def test_a_draft_is_judged_by_the_paper_s_forward(feature: str, folder: Path, tmp_path: Path) -> None:
    sprinter = head_of(folder, feature)
    assert drafted_difference(folder, sprinter, sprinter, tmp_path) < 1e-5


@every_feature
def test_training_reads_the_input_of_the_paper_s_forward(feature: str, folder: Path) -> None:
    sprinter = head_of(folder, feature)
    assert trained_difference(folder, sprinter, sprinter) < 1e-5


@pytest.mark.parametrize(("feature", "other"), [("pre", "post"), ("post", "pre")])
def test_a_state_of_the_neighbouring_token_is_far_from_the_paper_s_forward(
    feature: str, other: str, folder: Path, tmp_path: Path
) -> None:
    right = head_of(folder, feature)
    wrong = SprinterHead(replace(right.config, feature=other), right.unit)
    assert drafted_difference(folder, wrong, right, tmp_path) > 1e-3
    assert trained_difference(folder, wrong, right) > 1e-3


def test_facts_in_another_order_are_far_from_the_paper_s_forward(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (drafting, "foretoken.methods.sprinter.labels"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.facts_of", lambda q_MV, token_M: facts_of(q_MV, token_M).flip(-1))
    sprinter = head_of(folder, "drawn")
    assert drafted_difference(folder, sprinter, sprinter, tmp_path) > 1e-3
    assert trained_difference(folder, sprinter, sprinter) > 1e-3
