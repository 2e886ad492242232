"""What a rule or a drafter does that says nothing else of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken_lab.testing import Empty


class Noting(Verifier):
    """Records its arguments, and emits the number of calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        self.asked.append((draft, target, rng))
        return Verdict((), len(self.asked))


def given(count: int) -> tuple[list[Draft], list[Laws], list[Streams]]:
    laws = [Laws(torch.zeros(2, 4), greedy=False, positions=range(2)) for _ in range(count)]
    return [Draft(TokenTree([number])) for number in range(count)], laws, [Streams(number) for number in range(count)]


def test_several_are_decided_one_after_the_other() -> None:
    rule = Noting()
    drafts, targets, rngs = given(3)
    assert [verdict.extra for verdict in rule.verify_batch(drafts, targets, rngs)] == [1, 2, 3]
    assert rule.asked == list(zip(drafts, targets, rngs, strict=True))
    with pytest.raises(ValueError, match="zip"):
        rule.verify_batch(drafts, targets[:2], rngs)


def test_a_rule_without_a_budget_keeps_to_none() -> None:
    rule = Noting()
    (draft,), (target,), (rng,) = given(1)
    assert rule.verify_within(draft, target, rng, Metrics()).extra == 1
    assert rule.asked == [(draft, target, rng)]
    assert rule.budget is None
    assert rule.probe(NO_DRAFT, None) is None  # type: ignore[arg-type]


def test_a_drafter_without_a_model_reads_for_nothing() -> None:
    assert Empty().reading_flops(1000) == 0.0
