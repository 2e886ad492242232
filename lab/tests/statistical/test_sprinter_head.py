"""What the bundled SPRINTER head knows of a drafted token within each task, next to what the draft says itself."""

from __future__ import annotations

import pytest
import torch

from foretoken.drafting.learned_part import find
from foretoken.methods.sprinter.labels import Collecting, collect, prompts_of
from foretoken.methods.sprinter.network import SprinterHead
from foretoken.methods.sprinter.train import baselines, by_source
from foretoken.models.load import load
from foretoken_lab.recipes.sources import task

TASKS = ("arithmetic", "profiles", "json", "code")
FEWEST = 20  # of the rarer label, for an area to mean something


@pytest.fixture(scope="module")
def areas() -> dict[str, float]:
    """Of each score, the mean over tasks of the area under its ROC curve."""
    target, draft = load("zoo:base", device="cpu"), load("zoo:draft", device="cpu")
    head = find(SprinterHead, None, target, draft)
    read: list[str] = []
    how = Collecting(count=2400, steps=16, replies=True, temperature=1.0, seed=11)
    sources = [task(name, 0.25) for name in TASKS]
    examples = collect(target, draft, prompts_of(sources, target.tokenizer, 256, how, read), how)
    x_ND = examples.features(head.config.feature)
    scores = {
        "head": x_ND @ head.unit.weight_D + head.unit.bias,
        **baselines(examples.facts_N3),
        "chance": torch.rand(len(x_ND), generator=torch.Generator().manual_seed(0)),
    }
    source_N = [read[document] for document in examples.document_N.tolist()]
    found = by_source(scores, examples.labels(1.0, soft=False), source_N)
    told = [
        each["auc"]
        for each in found.values()
        if min(each["acceptable"], 1 - each["acceptable"]) * each["examples"] >= FEWEST
    ]
    assert len(told) >= 2, found
    return {name: sum(each[name] for each in told) / len(told) for name in scores}


def test_the_head_beats_chance_within_tasks(areas: dict[str, float]) -> None:
    assert abs(areas["chance"] - 0.5) < 0.06
    assert areas["head"] > 0.55


def test_the_draft_itself_knows_more(areas: dict[str, float]) -> None:
    """The card says so; should a head ever know more than q(y) or the entropy, it has to say that instead."""
    assert max(areas["q"], areas["entropy"], areas["margin"]) > areas["head"] - 0.02
