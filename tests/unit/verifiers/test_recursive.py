"""What remains of p after refused children, where rounding leaves one request of a batch without a residual."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foretoken.core.draft import Sampled
from foretoken.core.randomness import Streams
from foretoken.verifiers.recursive import RecursiveVerifier


class Refusing(Streams):
    """Refuses every child, and keeps the chances that it was given."""

    def __init__(self) -> None:
        super().__init__(0)
        self.chances: list[float] = []

    def bernoulli(self, purpose: str, chances: Sequence[float]) -> list[bool]:
        self.chances += chances
        return [False] * len(chances)


def test_a_request_without_a_residual_leaves_those_of_others_normalised() -> None:
    p_BV = torch.tensor([[0.0, 0.3, 0.0], [0.3, 0.3, 0.4]])  # as if rounding had taken mass from the first row
    q_BV = torch.tensor([[0.5, 0.5, 0.0], [0.28, 0.6, 0.12]])
    rngs = [Refusing(), Refusing()]
    picks = RecursiveVerifier.decide(Sampled, p_BV, q_BV, [(1, 0), (1, 0)], rngs)
    assert rngs[0].chances == pytest.approx([0.6])  # its second child is not tried
    assert rngs[1].chances == pytest.approx([0.5, 0.02 / 0.3 / 0.28], rel=1e-5)  # (p - q)+ = 0.02, 0, 0.28
    assert picks[0] == (None, 1)  # from p itself, the last that had mass
    assert picks[1] == (None, 2)  # (0.02 / 0.3 - 0.28)+ is 0
