"""Where a draft's distribution is looked up: by node, by token, and by column where a drafter scores some tokens
only.
"""

from __future__ import annotations

import pytest
import torch

from foretoken.core.columns import Columns
from foretoken.core.draft import (
    NO_DRAFT,
    Approvals,
    Draft,
    HubPair,
    PointMass,
    ResumePoint,
    Sampled,
    TopThenSampled,
    WithoutReplacement,
)
from foretoken.core.residual import excess, residual, residual_at
from foretoken.core.tree import TokenTree

Q = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.875, 0.0]])
KINDS = (Sampled, WithoutReplacement, TopThenSampled, HubPair)


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_was_drawn_from_its_row(kind: type) -> None:
    law = kind(Q, (1, 0, 0))
    assert [law.q_at(node).tolist() for node in range(3)] == [Q[1].tolist(), Q[0].tolist(), Q[0].tolist()]
    assert [law.chance(0, token) for token in range(3)] == [0.125, 0.875, 0.0]
    assert [law.chance(2, token) for token in range(3)] == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_a_column_was_not_drawn(kind: type) -> None:
    law = kind(Q, (1, 0, 0), Columns(torch.tensor([4, 0, 2]), 5))
    assert [law.chance(0, token) for token in range(5)] == [0.875, 0.0, 0.0, 0.0, 0.125]
    assert [law.chance(1, token) for token in range(5)] == [0.25, 0.0, 0.25, 0.0, 0.5]
    assert law.q_at(0).tolist() == [0.875, 0.0, 0.0, 0.0, 0.125]
    assert law.q_at(1).tolist() == [0.25, 0.0, 0.25, 0.0, 0.5]


def test_a_draft_is_as_long_as_its_tree() -> None:
    assert len(Draft(TokenTree([4, 5, 6], [-1, -1, 0]))) == 3
    assert len(NO_DRAFT) == 0


def test_a_part_of_a_chain_keeps_the_labels_of_its_nodes() -> None:
    whole = Draft(TokenTree([7, 8, 9, 6]), Sampled(Q, (1, 0, 1, 0)), (0.9, 0.8, 0.7, 0.6), sources=("a", "b", "c", "d"))
    part = whole.part(1, 3)
    assert (part.tree.tokens, part.tree.parents) == ((8, 9), (-1, 0))
    assert isinstance(part.law, Sampled)
    assert part.law.q_KV is Q
    assert part.law.row_of == (0, 1)
    assert (part.confidence, part.sources) == ((0.8, 0.7), ("b", "c"))
    assert whole.part(2).tree.tokens == (9, 6)
    assert whole.part(4) is NO_DRAFT
    assert Draft(TokenTree([7, 8])).part(0, 1) == Draft(TokenTree([7]), PointMass())


@pytest.mark.parametrize(
    "draft",
    [
        Draft(TokenTree([7, 8], [-1, -1])),
        Draft(TokenTree([7, 8]), resume=ResumePoint(1, torch.zeros(3, 2))),
        Draft(TokenTree([7, 8]), evidence=Approvals((True, True))),
    ],
    ids=["a tree", "begun by the target", "with evidence"],
)
def test_only_a_chain_of_tokens_has_parts(draft: Draft) -> None:
    with pytest.raises(ValueError, match="only a chain"):
        draft.part(0, 1)


def test_a_promise_is_the_number_of_tokens_that_are_expected_to_stand() -> None:
    assert Draft(TokenTree([1, 2, 3]), confidence=(0.5, 0.8, 0.1)).promise == pytest.approx(0.5 + 0.4 + 0.04)
    assert NO_DRAFT.promise == 0


@pytest.mark.parametrize("kept", [(3,), (7, 1, 4), tuple(range(9))], ids=str)
def test_the_residual_equals_that_of_the_whole_row(kept: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    p_V = torch.softmax(torch.randn(9, generator=generator), -1)
    law = Sampled(
        torch.softmax(torch.randn(2, len(kept), generator=generator), -1), (1,), Columns(torch.tensor(kept), 9)
    )
    whole = law.q_at(0)
    assert [law.chance(0, token) for token in range(9)] == whole.tolist()
    assert torch.equal(excess(p_V, law, 0), (p_V - whole).clamp(min=0))
    assert torch.equal(residual_at(p_V, law, 0), residual(p_V, whole))
    assert residual_at(whole, law, 0) is whole
