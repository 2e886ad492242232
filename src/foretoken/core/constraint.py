"""Constraints on a text: one more filter of the processed distribution, applied at every node that a rule reads."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Constraint(Protocol):
    """Which tokens may follow, for one request: a grammar, a schema, an automaton.

    A path holds tokens of a draft, hypothetically emitted after the committed output. It is part of the
    distribution and not of the draft, so that every lossless rule stays lossless: it keeps the target's distribution
    under the constraint.
    """

    @abstractmethod
    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """bool [V]: which tokens may follow the path. None: the path itself is forbidden, so it is never reached."""

    @abstractmethod
    def possible(self, path: Sequence[int]) -> bool:
        """Whether the path can be."""

    @abstractmethod
    def forced(self, limit: int) -> list[int]:
        """Tokens that follow for certain, at most so many: at each of their places no other is allowed."""

    @property
    def idle(self) -> bool:
        """Whether every token may follow from here on, whatever the text: then it is dropped."""
        return False

    @abstractmethod
    def append(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""

    @abstractmethod
    def copy(self) -> "Constraint":
        """The same constraint with a history of its own."""
