"""What the bundled judge knows of a refused token within a task, next to what is known without a head, and by
chance.
"""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.drafting.learned_part import find
from foretoken.engine.llm import LLM
from foretoken.methods.judge.network import JudgeHead
from foretoken.models.load import load
from foretoken_lab.judge.labels import read_states
from foretoken_lab.judge.mining import ABREAST, RANDOM, Mining, mine
from foretoken_lab.judge.train import best_without_head, quality, without_head

TASKS = ("arithmetic", "keys", "code", "profiles")  # json has no fine tokens: what differs there is wrong
FEWEST = 20  # of the rarer label, for an area to mean something

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """Of each task: what newly mined tokens say, of questions that the head was not made from."""
    plain = LLM(
        "zoo:base", device="cpu", threads=1, max_num_seqs=ABREAST, enable_prefix_caching=True, speculative_config=None
    )
    draft = load("zoo:draft", device="cpu")
    mined = mine(plain, draft, Mining(tasks=TASKS, count=400, held_out=True))
    labels, of_draft = read_states(plain.target, mined.questions), read_states(draft, mined.questions)
    kept_N = labels.asked_N & (labels.source_N != labels.sources.index(RANDOM))
    without = without_head(labels.of(kept_N), of_draft.law_N3[kept_N])
    labels = labels.of(kept_N)
    score_N = find(JudgeHead, None, plain.target).judge(labels.hidden_ND)
    found = {name: quality(labels, score_N, 0.5, without, name) for name in TASKS}
    print(found)
    return found


@pytest.mark.parametrize("task", TASKS)
def test_the_head_beats_chance_and_what_needs_no_head(told: dict[str, dict[str, Any]], task: str) -> None:
    found = told[task]
    best = best_without_head(found)
    assert min(found["fine"], found["bad"]) >= FEWEST
    assert best is not None
    assert set(found["auc_of"]) == {"p", "p_over_largest", "entropy", "q", "draft_entropy", "chance"}
    assert abs(found["auc_of"]["chance"] - 0.5) < 0.12
    assert found["auc"] > max(best[1], found["auc_of"]["chance"], 0.6)
