"""A draft lattice: for each of the next k tokens a distribution that does not know which tokens stand before it in the
draft.

             slot 1      slot 2      slot 3
    root ──   the         cat         sat        best token of each slot
              a           dog         is         and the next ones, with their probabilities

Two networks make lattices: a masked diffusion checkpoint (masked.py: the paper's) and a block of masks over the
target's own hidden states (block.py). Whether they become a searched path, a tree or a drawn path, the drafter decides.

Letters: k slots, C columns, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretoken.core.needs import Needs
from foretoken.core.protocols import Context, Features, Outcome
from foretoken.models.language_model import Output


@dataclass(frozen=True, slots=True)
class Lattice:
    """One request's slots: rows of a forward that several requests may share.

    Attributes:
        output: with the ``top`` best tokens of every row; a token that is not to be drafted has the logit -inf.
        first: the row of slot 1; the others follow.
        slots: k.
    """

    output: Output
    first: int
    slots: int

    @property
    def top(self) -> int:
        """Tokens that are ranked at each slot."""
        return len(self.output.top_ids) // len(self.output.best)

    @property
    def logits_kC(self) -> Tensor:
        """Raw logits; column i is token i unless ``output.columns`` says otherwise."""
        return self.output.logits_MV[self.first : self.first + self.slots]

    def ranked(self, slot: int) -> tuple[Sequence[int], Sequence[float]]:
        """The best tokens of a slot, counted from 0, best first, and their probabilities at temperature 1."""
        begin = (self.first + slot) * self.top
        return self.output.top_ids[begin : begin + self.top], self.output.top_shares[begin : begin + self.top]

    def ranked_all(self, slots: int) -> tuple[Sequence[int], Sequence[float]]:
        """The same of the first slots, one after the other."""
        begin, end = self.first * self.top, (self.first + slots) * self.top
        return self.output.top_ids[begin:end], self.output.top_shares[begin:end]


class LatticeNetwork(Protocol):
    """Makes lattices. A request's lattice follows from its own tokens alone, whoever runs next to it.

    Attributes:
        name: what messages call it.
        slots: k at most.
        needs: what it is shown of the target.
    """

    name: str
    slots: int
    needs: Needs = Needs()

    @abstractmethod
    def lattices(self, contexts: Sequence[Context], asked: Sequence[int] | None = None) -> list[Lattice | None]:
        """One for each context, in one pass; None where there is none: the text is too long, or was not seen.

        Args:
            asked: slots of each that are going to be looked at, from the first one on; None: all of them.
        """

    def on_forward(self, features: Sequence[Features]) -> None:
        """See :meth:`foretoken.core.protocols.Drafter.on_forward`."""
        return

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See :meth:`foretoken.core.protocols.Drafter.observe`."""
        return

    def release(self, request_id: int) -> None:
        """Forget a request."""
        return
