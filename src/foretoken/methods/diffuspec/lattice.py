"""A draft lattice: a distribution for each of the next k tokens, independent of the other tokens of the draft.

             slot 1      slot 2      slot 3
    root ──   the         cat         sat        best token of each slot
              a           dog         is         further tokens, with their probabilities

Two networks make lattices: a masked diffusion checkpoint (masked.py: the paper's) and a block of masks over the
target's own hidden states (block.py). The drafter makes a searched path, a tree or a sampled path of them.

Letters: k slots, C columns, V vocabulary.
"""

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
    """One request's slots: rows of a forward pass that several requests may share.

    Attributes:
        output: with the ``top`` best tokens of every row; a token that may not be drafted has the logit -inf.
        first: the row of slot 1; the rows of the other slots follow it.
        slots: k.
    """

    output: Output
    first: int
    slots: int

    @property
    def top(self) -> int:
        """Number of ranked tokens at each slot."""
        return len(self.output.top_ids) // len(self.output.best)

    @property
    def logits_kC(self) -> Tensor:
        """Raw logits; column i is token i unless ``output.columns`` says otherwise."""
        return self.output.logits_MV[self.first : self.first + self.slots]

    def ranked(self, slot: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return the best tokens of a slot (numbered from 0), best first, and their probabilities at temperature 1."""
        begin = (self.first + slot) * self.top
        return self.output.top_ids[begin : begin + self.top], self.output.top_shares[begin : begin + self.top]

    def ranked_all(self, slots: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return the best tokens and probabilities of the first slots, concatenated."""
        begin, end = self.first * self.top, (self.first + slots) * self.top
        return self.output.top_ids[begin:end], self.output.top_shares[begin:end]


class LatticeNetwork(Protocol):
    """Makes lattices. A request's lattice depends on its own tokens alone, not on the rest of the batch.

    Attributes:
        name: its name in messages.
        slots: maximum k.
        needs: features of the target that it reads.
    """

    name: str
    slots: int
    needs: Needs = Needs()

    @abstractmethod
    def lattices(self, contexts: Sequence[Context], counts: Sequence[int] | None = None) -> list[Lattice | None]:
        """Return one lattice per context, from one pass; None: the text is too long, or its states are unknown.

        Args:
            counts: number of leading slots of each lattice to score; None: all of them.
        """

    def on_forward(self, features: Sequence[Features]) -> None:
        """See :meth:`foretoken.core.protocols.Drafter.on_forward`."""
        return

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See :meth:`foretoken.core.protocols.Drafter.observe`."""
        return

    def release(self, request_id: int) -> None:
        """Drop the state of a request."""
        return
