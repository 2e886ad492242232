"""What the bundled judge knows of a refused token within a task, beside what the target's law says without a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.drafting.learned_part import find
from foretoken.engine.llm import LLM
from foretoken.methods.judge.head import JudgeHead
from foretoken.methods.judge.labels import read_states
from foretoken.methods.judge.mining import Mining, mine
from foretoken.methods.judge.train import quality
from foretoken.models.load import load

TASKS = ("arithmetic", "json")  # the others have hardly a fine token: what differs there is wrong
FEWEST = 20  # of the rarer label, for an area to mean something

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def areas() -> dict[str, dict[str, Any]]:
    """Of each task: areas under the ROC curve of newly mined tokens, of questions that the head was not made from."""
    plain = LLM("zoo:base", device="cpu", threads=1)
    draft = load("zoo:draft", device="cpu")
    mined = mine(plain, draft, Mining(tasks=TASKS, count=150, held_out=True))
    labels = read_states(plain.target, mined.questions)
    # of the draft's favourites, which these are, log q less that of the favourite says nothing
    sure_N = -read_states(draft, mined.questions).law_N2[labels.asked_N, 1]
    labels = labels.of(labels.asked_N)
    score_N = find(JudgeHead, None, plain.target).judge(labels.hidden_ND)
    chance_N = torch.rand(len(labels), generator=torch.Generator().manual_seed(0))
    found = {}
    for name in TASKS:
        here_N = labels.source_N == labels.sources.index(name)
        some = labels.of(here_N)
        told = quality(some, score_N[here_N], 0.5)
        others = {"draft": sure_N, "chance": chance_N}
        areas = {each: quality(some, other_N[here_N], 0.5)["auc"] for each, other_N in others.items()}
        found[name] = {"fine": told["fine"], "judge": told["auc"], **told["auc_of"], **areas}
    print(found)  # the page of results quotes it
    assert all(each["fine"] >= FEWEST for each in found.values())
    return found


@pytest.mark.parametrize("task", TASKS)
def test_the_head_beats_chance_and_what_needs_no_head(areas: dict[str, dict[str, Any]], task: str) -> None:
    found = areas[task]
    assert abs(found["chance"] - 0.5) < 0.12
    assert found["judge"] > max(found["p"], found["entropy"], found["draft"], found["chance"], 0.6)
