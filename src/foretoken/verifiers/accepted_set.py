"""Rules without chance: a child stands if its token is in a set that the target's distribution alone defines.

Letters: V vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from foretoken.core.distortion import emitted
from foretoken.core.randomness import Streams
from foretoken.verifiers.lossy import LossyVerifier
from foretoken.verifiers.walk import Pick, Siblings


class SetVerifier(LossyVerifier):
    """The first child in the set stands; if there is none the next token is a draw from p. Rules give the set."""

    @abstractmethod
    def members(self, p_V: Tensor) -> Tensor:
        """bool [V]: the tokens that stand; never one with p = 0."""

    def law(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings) -> Tensor:
        """The emitted distribution, with S the set and n the number of children.

            point masses:        1 at the first child in S; p if there is none
            independent draws:   q(x) [x in S] (1 - (1 - A)^n) / A + (1 - A)^n p(x),   A = q(S)

        One child: q [in S] + (1 - q(S)) p.
        """
        members_V = self.members(p_V)
        stands_V = torch.zeros_like(p_V)
        if q_V is None:
            first = next((token for token in tokens if members_V[token]), None)
            if first is None:
                return p_V
            stands_V[first] = 1.0
            return stands_V
        stands_V = torch.where(members_V, q_V, stands_V)
        chance = min(float(stands_V.sum()), 1.0)
        if chance > 0.0 and len(tokens) > 1:
            stands_V *= (1.0 - (1.0 - chance) ** len(tokens)) / chance
        return emitted(stands_V, p_V)

    def decide(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams) -> Pick:
        members_V = self.members(p_V)
        for number, token in enumerate(tokens):
            if members_V[token]:
                return number, token
        return None, rng.categorical("residual", p_V)

    def stands(self, p_V: Tensor, q_V: Tensor | None, token: int) -> bool:
        return bool(self.members(p_V)[token])
